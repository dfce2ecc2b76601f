"""Fault tolerance: a rank dies by SIGKILL in mid-step, and the run goes on.

Data parallel groups hold the same model, so a dead group's state is not lost: its peers have it. Each group is a
process group of its own (FSDP inside); only the mean of the gradients crosses groups, and a lighthouse says, before
each step, who takes part in it. Who dies is not asked again; who comes back copies a peer's state, bit for bit.

    lighthouse   heartbeats in, members out:   {0, 1}  {0, 1}       {0}     {0}     {0, 1}          {0, 1}
    group 0      step 3 | step 4 X redo | 1 s pause | step 4 | step 5 | sends its state | step 6 | step 7
    group 1      step 3 | step 4 X killed . . . . . starts again . . .  | gets it       | step 6 | step 7

A step is an attempt: quorum, forward, backward, mean over the members, and a vote of the group's ranks. A peer's death
breaks the mean, the vote fails, nothing was updated, and the attempt is repeated with who is left. Nobody restarts.

    with N GPUs that each fail once in m hours          a failure every M = m / N
    restart all from a checkpoint                       goodput 1 - d/t - (t/2 + R)/M, d to save, t between saves,
                                                        R to restart; best t = sqrt(2 d M) (Young; Daly for small M)
    a replica heals (G groups)                          goodput 1 - (p + s/2)/M - D/(G M), p the pause (heartbeat
                                                        timeout), s a step, D the time that the dead group is away

    use                                                 when
    `run_elastic`: torchrun restarts, checkpoint        R and t/2 are small beside M; one group only (FSDP, TP, PP)
    `FaultTolerantReplica`                              M below an hour, at least two whole copies of the model
    semi-synchronous (`train_semi_synchronously`)       copies in different buildings: 1/k of the traffic
    both                                                always: when all groups die, only a checkpoint is left

Security: torchft's manager and checkpoint server bind [::], ask for no password, and whoever heals unpickles what it
gets, so anyone who reaches these ports can run code in the job. Loopback or a closed network only.

Hangs: a process that hangs in Python still sends heartbeats (Rust threads do that), and its peers would wait for it. So
each rank has a deadline for its own work, `work_timeout`, kept by faulthandler: it prints where it hangs, and exits.

Not here: a lighthouse that is itself replicated (its death ends all steps until it is back), quorum in the background
of a forward, streamed or quantised outer gradients. torchft has these.

References: torchft https://github.com/meta-pytorch/torchft · Young 1974, Daly 2006 (optimal checkpoint interval) ·
DiLoCo https://arxiv.org/abs/2311.08105 · torchrun https://docs.pytorch.org/docs/stable/elastic/run.html
Legend: a group is a replica of the model, of one or more ranks; a life is a start of a group's processes.
"""

import contextlib
import faulthandler
import hashlib
import importlib
import io
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

# ---- by hand --------------------------------------------------------------------------------------------------


def form_quorum_by_hand(silent_for: dict[str, float], asked: dict[str, int], timeout: float) -> list[str] | None:
    """Who takes part in the next step, or None: not yet. Seconds since each member's last heartbeat; who asked -> step.

    Everybody who is alive has to ask first: a quorum that leaves out a member who is merely slow would split the run.
    """
    alive = {name for name, seconds in silent_for.items() if seconds < timeout}
    return sorted(alive) if alive and alive <= asked.keys() else None


def lighthouse_by_hand(store: dist.TCPStore, timeout: float, members: int) -> None:
    """Serves quorums through a store, for ever. The first has `members`, so that nobody starts alone."""
    beats, heard, answered, epoch, last = {}, {}, {}, 0, []
    while True:
        now = time.monotonic()
        names = [f"member_{i}" for i in range(store.add("n_members", 0)) if store.check([f"beat/member_{i}"])]
        for name in names:
            beat = store.get(f"beat/{name}")
            if beats.get(name) != beat:
                beats[name], heard[name] = beat, now
        asked = {}
        for name in names:
            if store.check([f"ask/{name}"]):
                turn, step = map(int, store.get(f"ask/{name}").split())
                if answered.get(name) != turn:
                    asked[name] = turn, step
        silent_for = {name: now - t for name, t in heard.items()}
        quorum = form_quorum_by_hand(silent_for, {name: step for name, (_, step) in asked.items()}, timeout)
        if quorum and (epoch or len(quorum) >= members):
            epoch += quorum != last
            last = quorum
            answer = json.dumps({"epoch": epoch, "steps": {name: asked[name][1] for name in quorum}})
            for name in quorum:
                answered[name] = asked[name][0]
                store.set(f"answer/{name}/{answered[name]}", answer)
        time.sleep(0.005)


class ReplicaByHand:
    """What `FaultTolerantReplica` does, for groups of one rank, in a store and gloo."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, host: str, port: int, timeout: float = 20.0):
        self.model, self.optimizer, self.step, self.share, self.sound = model, optimizer, 0, (0, 1), True
        self.wait = timedelta(seconds=timeout)
        self.store, for_beats = (dist.TCPStore(host, port, is_master=False, timeout=self.wait) for _ in range(2))
        self.name = f"member_{self.store.add('n_members', 1) - 1}"
        self.turn, self.epoch, self.peers = 0, 0, None
        threading.Thread(target=self._beat, args=(for_beats,), daemon=True).start()

    def _beat(self, store) -> None:
        n = 0
        while True:
            store.set(f"beat/{self.name}", str(n := n + 1))
            time.sleep(0.05)

    def begin(self) -> bool:
        """Ask; if the members changed, connect anew; if steps differ, take the state of who is furthest. -> healed?"""
        self.turn += 1
        self.store.set(f"ask/{self.name}", f"{self.turn} {self.step}")
        answer = json.loads(self.store.get(f"answer/{self.name}/{self.turn}"))  # waits for it
        names, steps = list(answer["steps"]), list(answer["steps"].values())
        self.share, self.sound = (names.index(self.name), len(names)), True
        self.optimizer.zero_grad()
        if answer["epoch"] != self.epoch:
            self.epoch = answer["epoch"]
            fresh = dist.PrefixStore(f"epoch_{self.epoch}", self.store)  # a new name: nobody dials the dead
            self.peers = dist.ProcessGroupGloo(fresh, *self.share, self.wait)
        if len(set(steps)) > 1:
            source = steps.index(max(steps))
            mine = io.BytesIO()
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], mine)
            data = torch.frombuffer(bytearray(mine.getvalue()), dtype=torch.uint8)
            length = torch.tensor([len(data)])
            self.peers.broadcast(length, source).wait()
            data = data if self.share[0] == source else torch.empty(length, dtype=torch.uint8)
            self.peers.broadcast(data, source).wait()
            if self.step < max(steps):
                model, optimizer = torch.load(io.BytesIO(data.numpy().tobytes()))
                self.model.load_state_dict(model)
                self.optimizer.load_state_dict(optimizer)
                self.step = max(steps)
                return True
        return False

    def mean(self, tensor: Tensor) -> None:
        if self.sound:
            try:
                self.peers.allreduce([tensor]).wait()
                tensor /= self.share[1]
            except RuntimeError:  # a peer is dead: what is in `tensor` now is nobody's mean
                self.sound = False

    def commit(self) -> bool:
        if self.sound:
            self.optimizer.step()
            self.step += 1
        return self.sound


# ---- native: torchft ------------------------------------------------------------------------------------------


def _local(value):
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def load_parts(model: nn.Module, optimizer: torch.optim.Optimizer, parts: dict) -> None:
    """A rank's own parts of a "model" and its "optimizer", as plain tensors, into those of this rank."""
    for name, mine in model.state_dict().items():
        _local(mine).copy_(parts["model"][name])
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def like(value, p):
        if not isinstance(value, Tensor):
            return value
        value = value.clone()  # what a peer sent lies in a read-only buffer
        if value.dim() == 0 or not isinstance(p, DTensor):
            return value
        whole = {"shape": p.shape, "stride": p.stride(), "run_check": False}
        return DTensor.from_local(value.to(p.device), p.device_mesh, p.placements, **whole)

    state = {i: {k: like(v, params[i]) for k, v in s.items()} for i, s in parts["optimizer"]["state"].items()}
    optimizer.load_state_dict(parts["optimizer"] | {"state": state})


class FaultTolerantReplica:
    """One of several groups of ranks that train the same model, any of which may die and come back (torchft).

        replica = FaultTolerantReplica(model, optimizer, name="group_0", lighthouse=address, store=store)
        for step in replica.steps(n_steps, n_groups):
            loss = loss_of(model(rows_of(step, *replica.share)))   # this group's number, and of how many
            loss.backward()                                        # gradients come out as means over the groups
            replica.commit()                                       # optimizer.step(), or the step comes again

    model: plain, or cut by `fully_shard` over `group` (None: the default one). store: a TCPStore that is new for each
    life of this group (an old one holds the dead manager's address). lighthouse: torchft's, with min_replicas=1.
    returning: this is not the group's first life; then it must heal from a peer, and raises RuntimeError where it would
    train alone from scratch. peer_timeout: s, of a collective and of healing; quorum_timeout: s, for all who are alive
    to ask; work_timeout: s, of this rank's own work between two waits: past it the rank prints its stacks and exits 1.
    report(kind, **numbers) hears "quorum", "healed", "commit", "redo", "alone". ValueError for a timeout of 0 or less.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        name: str,
        lighthouse: str,
        store: dist.TCPStore,
        group: dist.ProcessGroup | None = None,
        returning: bool = False,
        peer_timeout: float = 10.0,
        quorum_timeout: float = 60.0,
        work_timeout: float = 60.0,
        average_gradients: bool = True,
        report: Callable[..., None] = lambda kind, **details: None,
    ):
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        if not min(peer_timeout, quorum_timeout, work_timeout) > 0:
            raise ValueError(
                f"peer_timeout={peer_timeout}, quorum_timeout={quorum_timeout}, work_timeout={work_timeout} seconds: "
                "each must be above 0"
            )
        self.model, self.optimizer, self.report = model, optimizer, report
        self.step, self.share, self.name = 0, (0, 1), name
        self.store = store  # which lives as long as whoever serves it holds it
        self.work_timeout, self.returning, self.n_healed, self.quorum = work_timeout, returning, 0, -1
        on_gpu = next(model.parameters()).is_cuda
        self.peers = (ProcessGroupNCCL if on_gpu else ProcessGroupGloo)(timeout=timedelta(seconds=peer_timeout))
        self.manager = Manager(
            pg=self.peers,
            load_state_dict=self.load_state_dict,
            state_dict=self.state_dict,
            min_replica_size=1,
            use_async_quorum=False,  # the other way reads the state from a second thread, under FSDP's hands
            timeout=timedelta(seconds=peer_timeout),
            quorum_timeout=timedelta(seconds=quorum_timeout),
            connect_timeout=timedelta(seconds=peer_timeout),
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
            store_addr=store.host,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=name,
            hostname=store.host,
        )
        if average_gradients:
            units = [m for m in model.modules() if isinstance(m, FSDPModule)]
            for unit in units:
                unit.set_all_reduce_hook(self.mean)  # after the reduce-scatter in the group: 1/n of the gradient
            for p in () if units else model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: self.mean(_local(p.grad)))

    def state_dict(self) -> dict:
        """What a peer needs: this rank's own part of model and optimizer, and the step."""
        return tree_map(
            _local, {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        )

    def load_state_dict(self, theirs: dict) -> None:
        load_parts(self.model, self.optimizer, theirs)
        self.step = theirs["step"]
        self.n_healed += 1

    @contextlib.contextmanager
    def _waiting(self):
        """While others are waited for, their deadlines hold; else this rank's own: late, it says where it is, and dies."""
        faulthandler.cancel_dump_traceback_later()
        yield
        faulthandler.dump_traceback_later(self.work_timeout, exit=True)

    def begin(self) -> None:
        """A new attempt at `self.step`: who takes part, and a peer's state for those who are behind."""
        healed = self.n_healed
        with self._waiting():
            self.manager.start_quorum()
        self.share = self.manager.participating_rank(), self.manager.num_participants()
        if self.manager._quorum_id != self.quorum:
            self.quorum = self.manager._quorum_id
            self.report("quorum", step=self.step, quorum=self.quorum, members=self.share[1])
        if self.n_healed > healed:
            self.report("healed", step=self.step)
        elif self.returning:
            raise RuntimeError(
                f"{self.name} came back, and found {self.share[1] - 1} peers that are further than step {self.step}: "
                "it would train alone from there. Load a checkpoint into every group, then pass returning=False"
            )
        self.returning = False
        self.optimizer.zero_grad()

    def mean(self, tensor: Tensor) -> None:
        """In place, over the groups that take part. A peer that dies in it spoils the attempt, not this process."""
        with self._waiting():
            self.manager.allreduce(tensor).wait()

    def commit(self, update: bool = True) -> bool:
        """Ask all ranks of this group whether the attempt is sound. If it is, update and count the step."""
        with self._waiting():
            sound = self.manager.should_commit()
        if sound and update:
            self.optimizer.step()
            self.step += 1
        self.report("commit" if sound else "redo", step=self.step, members=self.share[1], update=update)
        return sound

    def steps(self, n_steps: int, n_groups: int = 1, patience: float = 60.0) -> Iterator[int]:
        """Numbers of the steps to compute, each until it is committed. Ends when `n_groups` have all of them.

        At the first step and after the last, with fewer groups than `n_groups`, there are rounds without work instead:
        nobody starts alone, and who comes back late finds somebody to heal from. Peers must agree on what a round is,
        so it follows from what they all know, the step and the number of members. Gives up after `patience` seconds.
        """
        patient_until = time.monotonic() + patience
        while True:
            self.begin()
            complete = self.share[1] >= n_groups
            if self.step < n_steps and (complete or self.step > 0):
                yield self.step
                patient_until = time.monotonic() + patience
                continue
            self.mean(torch.zeros(1, device=next(self.model.parameters()).device))  # a peer has its state by then
            if self.commit(update=False) and complete and self.step >= n_steps:
                return
            if time.monotonic() > patient_until:
                self.report("alone", step=self.step)
                return
            time.sleep(0.02)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.manager.shutdown(wait=False)


# ---- native: torchrun starts everybody again ------------------------------------------------------------------


def torchrun_store(timeout: float = 1800.0) -> dist.Store:
    """The store of this attempt, as `init_process_group(store=..)` wants it: nobody dials the dead of the one before.

    By default torchrun's own store serves all attempts, so this one gets a prefix: the number of restarts. Across nodes
    agents count differently (who was killed and rejoins begins at 0), and only a store that is made anew for each
    attempt will do: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment, with --rdzv-backend c10d.
    timeout: s, until all are there. ValueError for several nodes that may restart and share one store.
    """
    rank = int(os.environ["RANK"])
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts, nodes = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)), int(os.environ.get("GROUP_WORLD_SIZE", 1))
    if agent_has_it and restarts > 0 and nodes > 1:
        raise ValueError(
            f"{nodes} nodes with --max-restarts {restarts} share one store, in which a node that rejoins would not find "
            "the others: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node, and use --rdzv-backend c10d"
        )
    address, wait = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=timeout)
    store = dist.TCPStore(*address, is_master=rank == 0 and not agent_has_it, wait_for_workers=False, timeout=wait)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store) if agent_has_it else store


def run_elastic(
    build: Callable[[], object],
    train_step: Callable[[object, int], None],
    n_steps: int,
    load: Callable[[object], int],
    save: Callable[[object, int], None],
    save_every: int = 10,
    timeout: float = 60.0,
) -> None:
    """The body of a script for `torchrun --max-restarts 3`: from the last checkpoint to the end. Does not return.

    build() -> state, after the process group is there; load(state) -> steps done (0: nothing saved yet);
    save(state, steps_done). A dead rank makes the others' collectives fail, torchrun ends them and starts all again.
    """
    if save_every < 1:
        raise ValueError(f"save_every={save_every} of {n_steps} steps: at least 1, or a restart begins at step 0")
    rank, world, wait = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout)
    store = torchrun_store(timeout)
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else None
    backend = "nccl" if on_gpus else "cpu:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait, device_id=device)
    state = build()
    for step in range(load(state), n_steps):
        train_step(state, step)
        if (step + 1) % save_every == 0 or step + 1 == n_steps:
            save(state, step + 1)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # about one gloo process in ten aborts while the interpreter exits, and torchrun would start again


# ---- a laboratory: groups of processes that are really killed -------------------------------------------------


class Laboratory:
    """Starts groups of ranks, kills and restarts them, and returns what they reported.

        with Laboratory() as laboratory:
            events = laboratory.run("train_replica", groups=2, ranks=2, kills=[kill(1, 0, step=4, after=0.02)])

    One process imports torch and forks all others, which so start in milliseconds, like spare machines that wait warm.
    It ends, and all of them with it, when this process closes the laboratory or dies.
    """

    def __enter__(self):
        self.errors, self.unread = tempfile.TemporaryFile(), b""
        torchrun = ("MASTER_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(torchrun)}
        environment |= {"RUST_LOG": "error", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, os.path.abspath(__file__), "--laboratory"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.parent = subprocess.Popen(command, env=environment, **pipes)
        return self

    def __exit__(self, *_):
        self.parent.stdin.close()
        try:
            self.parent.wait(10)
        except subprocess.TimeoutExpired:
            self.parent.kill()
            self.parent.wait()
        self.parent.stdout.close()
        self.errors.close()

    def _tell(self, what: str, **details) -> None:
        self.parent.stdin.write(json.dumps({"what": what} | details).encode() + b"\n")
        self.parent.stdin.flush()

    def _hear(self, until: float) -> list[dict]:
        if not select.select([self.parent.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            return []
        data = os.read(self.parent.stdout.fileno(), 65536)
        if not data:
            raise RuntimeError(f"the parent of all ranks ended: {self.parent.wait()}\n{self._last_errors()}")
        *lines, self.unread = (self.unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _last_errors(self, n: int = 2000) -> str:
        self.errors.seek(max(0, self.errors.seek(0, 2) - n))
        return self.errors.read().decode(errors="replace")

    def run(
        self,
        worker: str,
        groups: int = 2,
        ranks: int = 2,
        kills: Iterable[dict] = (),
        deadline: float = 60.0,
        heartbeat_timeout: float = 1.0,
        away: float = 0.0,
        max_lives: int = 4,
        options: dict | None = None,
    ) -> list[dict]:
        """Events of a run of `worker(place, report, **options)`, a function of this file, in groups × ranks processes.

        A group of which a rank ends other than by 0 is ended whole, and started again after `away` seconds. An event has
        "time" (s since the start), "kind", and the "group", "rank", "life" and "pid" that it is about. TimeoutError
        after `deadline` s; RuntimeError when a group has ended `max_lives` times. No process is left either way.
        """
        began = time.monotonic()
        events, kills, timers, lives, finished = [], list(kills), [], {}, set()
        alive: dict[int, dict] = {}  # pid -> its birth
        lighthouse = None

        def note(event):
            events.append(event | {"time": event["time"] - began})

        def start(group):
            place = {"group": group, "life": lives[group], "ranks": ranks, "lighthouse": lighthouse}
            self._tell("start", worker=worker, place=place, options=options or {})

        def kill_it(dying):
            if dying["pid"] in alive:
                note(dying | {"time": time.monotonic(), "kind": "kill"})
                self._tell("kill", pid=dying["pid"])

        def handle(event):
            nonlocal lighthouse
            note(event)
            kind, pid, group = event["kind"], event["pid"], event["group"]
            if kind == "born":
                alive[pid] = event
            elif kind == "lighthouse":
                lighthouse = event["address"]
                for g in range(groups):
                    lives[g] = 0
                    start(g)
            elif kind == "forward":
                for k in [k for k in kills if event.items() >= k["at"].items() and event["step"] >= k["step"]]:
                    kills.remove(k)
                    timers.append((event["time"] + k["after"], partial(kill_it, event)))
            elif kind == "exit":
                del alive[pid]
                if event["code"] == 0:
                    finished.add((group, event["rank"]))
                elif group < 0 or event["life"] + 1 >= max_lives:
                    raise RuntimeError(f"group {group} ended {event['life'] + 1} times:\n{self._last_errors()}")
                elif event["life"] == lives[group]:
                    lives[group] += 1
                    finished.difference_update({(group, rank) for rank in range(ranks)})
                    for other in [p for p, born in alive.items() if born["group"] == group]:
                        self._tell("kill", pid=other)
                    timers.append((time.monotonic() + away, partial(start, group)))

        self._tell("lighthouse", worker=worker, options={"groups": groups, "heartbeat_timeout": heartbeat_timeout})
        try:
            while len(finished) < groups * ranks:
                now = time.monotonic()
                if now - began > deadline:
                    raise TimeoutError(f"not over after {deadline} s: {_last_words(events)}\n{self._last_errors()}")
                for due in [t for t in timers if t[0] <= now]:
                    timers.remove(due)
                    due[1]()
                for event in self._hear(min([began + deadline, *(t for t, _ in timers)])):
                    handle(event)
        finally:
            self._tell("kill", pid=-1)  # all that are left, such as the lighthouse
            until = time.monotonic() + 10
            while alive and time.monotonic() < until:
                for event in self._hear(until):
                    if event["kind"] == "born":
                        alive[event["pid"]] = event
                    elif event["kind"] == "exit":
                        alive.pop(event["pid"], None)
        return events


def kill(group: int, rank: int, step: int, after: float = 0.0, life: int = 0) -> dict:
    """SIGKILL, `after` seconds after that rank says that it begins that step (or, if it skips it, a later one)."""
    return {"at": {"group": group, "rank": rank, "life": life}, "step": step, "after": after}


def _last_words(events: list[dict]) -> str:
    last = {(e["group"], e["rank"]): e for e in events if e["group"] >= 0}
    return "; ".join(f"group {g} rank {r}: {e['kind']} {e.get('step', '')}" for (g, r), e in sorted(last.items()))


def _laboratory() -> None:
    """The parent of all ranks: reads commands, forks, ends children by pid, tells births and exits."""
    for name in ("torch._dynamo", "torchft.coordination"):  # every optimizer imports the first: once is enough
        importlib.import_module(name)
    events = os.dup(1)
    os.dup2(2, 1)  # a stray print is no event
    children: dict[int, dict] = {}
    unread = b""

    def report_as(who):
        def report(kind, **details):  # a write below 4 kB arrives whole
            os.write(events, (json.dumps(who | {"time": time.monotonic(), "kind": kind} | details) + "\n").encode())

        return report

    def fork(body, place, options):
        who = {key: place[key] for key in ("group", "rank", "life")}
        pid = os.fork()
        if pid == 0:
            os.close(0)
            code = 1
            try:
                if sys.platform == "linux":
                    import ctypes

                    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
                body(place, report_as(who | {"pid": os.getpid()}), **options)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[pid] = who | {"pid": pid}
        report_as(children[pid])("born")

    while True:
        while children and (found := os.waitpid(-1, os.WNOHANG))[0]:
            report_as(children.pop(found[0]))("exit", code=os.waitstatus_to_exitcode(found[1]))
        if not select.select([0], [], [], 0.005)[0]:
            continue
        data = os.read(0, 65536)
        *lines, unread = (unread + data).split(b"\n")
        for line in map(json.loads, lines):
            if line["what"] == "kill":
                for pid in list(children) if line["pid"] < 0 else {line["pid"]} & children.keys():
                    os.kill(pid, signal.SIGKILL)
                continue
            host = {"group": -1, "rank": 0, "life": 0, "ranks": 1, "by_hand": line["worker"].endswith("by_hand")}
            with socket.create_server(("127.0.0.1", 0)) as listener:
                place = host | line.get("place", {}) | {"listener": listener}
                body = _keep_lighthouse if line["what"] == "lighthouse" else globals()[line["worker"]]
                for rank in range(place["ranks"]):
                    fork(body, place | {"rank": rank}, line["options"])
        if not data:  # whoever opened this laboratory has closed it, or is dead
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)


def _keep_lighthouse(place, report, groups, heartbeat_timeout) -> None:
    if place["by_hand"]:
        store = open_store(place)
        report("lighthouse", address=f"{store.host}:{store.port}")
        lighthouse_by_hand(store, heartbeat_timeout, groups)
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 10_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": round(1000 * heartbeat_timeout)}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
    report("lighthouse", address=lighthouse.address())
    signal.pause()


def open_store(place: dict) -> dist.TCPStore:
    """The store of one life of a group: rank 0 serves it on the socket that the group was born with."""
    host, port = place["listener"].getsockname()
    serves = {"is_master": True, "master_listen_fd": place["listener"].detach()} if place["rank"] == 0 else {}
    place["listener"].close()  # else a dead rank 0 would still be dialled, and never answer
    return dist.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=30), **serves)


# ---- what runs in it, and the demo ----------------------------------------------------------------------------


class _Net(nn.Module):
    def __init__(self, dim=8, n_layers=3):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim) for _ in range(n_layers)])

    def forward(self, x_BD):
        for layer in self.layers:
            x_BD = x_BD + torch.tanh(layer(x_BD))
        return x_BD.square().mean(dim=1)


def rows_of(step: int, share: int, n_shares: int, n_rows: int = 12, dim: int = 8) -> Tensor:
    """A share of the batch of a step. The batch is the same however many share it: a death changes no update."""
    if n_rows % n_shares:
        raise ValueError(f"{n_rows} rows among {n_shares}: unequal, and the mean of their means is not the mean")
    rows = torch.randn(n_rows, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return rows.chunk(n_shares)[share]


def new_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _Net().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def one_process(n_steps: int) -> tuple[list[float], list[list[float]]]:
    """Losses and final parameters of the run in which nobody dies, in one process."""
    model, optimizer = new_model(0)
    losses = []
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = model(rows_of(step, 0, 1)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.flatten().tolist() for p in model.parameters()]


def _sharded(place, seed):
    model, _ = new_model(seed)
    mesh = init_device_mesh("cpu", (place["ranks"],))
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model


def _join_group(place) -> dist.TCPStore:
    store = open_store(place)
    named, wait = dist.PrefixStore("group", store), timedelta(seconds=20)
    dist.init_process_group("gloo", store=named, rank=place["rank"], world_size=place["ranks"], timeout=wait)
    return store


def _say_result(report, model, state, **details) -> None:
    """A hash of this rank's own part of the state, then the whole parameters."""
    parts = [t.detach().numpy().tobytes() if isinstance(t, Tensor) else repr(t).encode() for t in tree_leaves(state)]
    report("state", digest=hashlib.sha256(b"".join(parts)).hexdigest(), **details)
    for i, p in enumerate(model.parameters()):
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        report("parameter", index=i, values=whole.flatten().tolist())


def train_replica(place, report, n_steps=10, groups=2, step_seconds=0.05, hang=None, **timeouts) -> None:
    """A group of FSDP ranks. step_seconds: a sleep for the work of a step. hang: {"group", "rank", "step"}, life 0."""
    rank, ranks = place["rank"], place["ranks"]
    store = _join_group(place)
    model = _sharded(place, seed=place["life"])  # who comes back has other weights: only healing can make them equal
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    name, returning = f"group_{place['group']}", place["life"] > 0
    where = {"name": name, "lighthouse": place["lighthouse"], "store": store, "returning": returning}
    replica = FaultTolerantReplica(model, optimizer, report=report, **where, **timeouts)
    report("up")
    for step in replica.steps(n_steps, groups):
        report("forward", step=step)
        share, n = replica.share
        loss = model(rows_of(step, share * ranks + rank, n * ranks)).mean()
        time.sleep(step_seconds)
        if hang == {"group": place["group"], "rank": rank, "step": step} and place["life"] == 0:
            time.sleep(1000)
        loss.backward()
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        replica.mean(loss)
        if replica.commit():
            report("loss", step=step, loss=loss.item())
    _say_result(report, model, replica.state_dict(), step=replica.step)
    replica.close()


def train_by_hand(place, report, n_steps=10, groups=2, step_seconds=0.05) -> None:
    """A group of one rank, with `ReplicaByHand`."""
    host, port = place["lighthouse"].split(":")
    model, optimizer = new_model(seed=place["life"])
    replica = ReplicaByHand(model, optimizer, host, int(port))
    report("up")
    while True:
        if replica.begin():
            report("healed", step=replica.step)
        if replica.step == n_steps and replica.share[1] == groups:
            break  # all have all
        if replica.step == n_steps:
            time.sleep(0.02)
            continue
        report("forward", step=replica.step)
        loss = model(rows_of(replica.step, *replica.share)).mean()
        time.sleep(step_seconds)
        loss.backward()
        for p in model.parameters():
            replica.mean(p.grad)
        replica.mean(loss := loss.detach())
        sound = replica.commit()
        report("commit" if sound else "redo", step=replica.step, members=replica.share[1], update=True)
        if sound:
            report("loss", step=replica.step - 1, loss=loss.item())
    _say_result(report, model, [model.state_dict(), optimizer.state_dict(), replica.step], step=replica.step)


def train_semi_synchronously(place, report, n_steps=6, every=4, groups=2, outer="diloco", step_seconds=0.02) -> None:
    """DiLoCo: each group takes `every` AdamW steps alone, then all take one step along the mean of how far they moved.

    outer: "diloco" (Nesterov momentum) or "local_sgd" (a plain mean). n_steps counts rounds: what is lost with a death,
    and what survivors do again, is a round.
    """
    rank, ranks = place["rank"], place["ranks"]
    store = _join_group(place)
    model = _sharded(place, seed=place["life"])
    parameters = [*model.parameters()]
    inner = torch.optim.AdamW(parameters, lr=1e-2)
    momentum = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if outer == "diloco" else {"lr": 1.0}
    where = {"name": f"group_{place['group']}", "lighthouse": place["lighthouse"], "store": store, "report": report}
    where |= {"returning": place["life"] > 0, "average_gradients": False}
    replica = FaultTolerantReplica(model, torch.optim.SGD(parameters, **momentum), **where)
    report("up")
    for number in replica.steps(n_steps, groups):
        report("forward", step=number)
        share, n = replica.share
        start = [p.detach().clone() for p in parameters]
        for step in range(number * every, number * every + every):
            inner.zero_grad()
            loss = model(rows_of(step, share * ranks + rank, n * ranks)).mean()
            time.sleep(step_seconds)
            loss.backward()
            inner.step()
        with torch.no_grad():
            for p, before in zip(parameters, start, strict=True):
                p.grad = before - p  # the outer gradient
                replica.mean(_local(p.grad))
                p.copy_(before)
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        replica.mean(loss)
        if replica.commit():
            report("loss", step=number, loss=loss.item())
    _say_result(report, model, replica.state_dict(), step=replica.step)
    replica.close()


def save_by_rank(folder: str, state: object, step: int) -> None:
    """This rank's part, whole or not at all: written aside, then renamed."""
    path = pathlib.Path(folder) / f"{step}_{dist.get_rank()}_of_{dist.get_world_size()}.pt"
    aside = path.with_suffix(f".{os.getpid()}")
    torch.save(state, aside)
    os.replace(aside, path)


def load_by_rank(folder: str) -> tuple[int, object]:
    """(steps done, this rank's part) of the newest step of which all ranks' parts are there, or (0, None)."""
    rank, n = dist.get_rank(), dist.get_world_size()
    steps = [int(p.name.split("_")[0]) for p in pathlib.Path(folder).glob(f"*_of_{n}.pt")]
    step = max((s for s in steps if steps.count(s) == n), default=0)
    dist.barrier()  # nobody writes before all have looked
    return step, torch.load(pathlib.Path(folder) / f"{step}_{rank}_of_{n}.pt") if step else None


def train_elastic(place, report, **options) -> None:
    """`elastic_training` in the laboratory, which here sets what torchrun would."""
    host, port = place["listener"].getsockname()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(place["life"])}
    os.environ |= {
        "RANK": str(place["rank"]),
        "WORLD_SIZE": str(place["ranks"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    place["served"] = open_store(place) if place["rank"] == 0 else None
    elastic_training(report, **options)


def elastic_training(report, folder, n_steps=10, save_every=3, step_seconds=0.05) -> None:
    """`run_elastic` with the small model and a file a rank: under torchrun, or in the laboratory."""

    def build():
        model = _sharded({"ranks": dist.get_world_size()}, seed=0)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def parts(state):
        return tree_map(_local, {"model": state[0].state_dict(), "optimizer": state[1].state_dict()})

    def load(state):
        step, saved = load_by_rank(folder)
        if saved:
            load_parts(*state, saved)
        report("loaded", step=step)
        return step

    def train_step(state, step):
        report("forward", step=step)
        model, optimizer = state
        optimizer.zero_grad()
        loss = model(rows_of(step, dist.get_rank(), dist.get_world_size())).mean()
        time.sleep(step_seconds)
        loss.backward()
        optimizer.step()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        report("loss", step=step, loss=loss.item())

    def save(state, step):
        save_by_rank(folder, parts(state), step)
        report("saved", step=step)
        if step == n_steps:
            _say_result(report, state[0], parts(state), step=step)

    run_elastic(build, train_step, n_steps, load, save, save_every)


def against_one_process(events: list[dict], n_steps: int) -> dict[str, float]:
    """Largest relative errors of losses and of final parameters; and how many groups' states differ in any bit."""
    losses, parameters = one_process(n_steps)
    errors = {"loss": 0.0, "parameter": 0.0}
    for e in events:
        if e["kind"] == "loss":
            errors["loss"] = max(errors["loss"], abs(e["loss"] / losses[e["step"]] - 1))
        elif e["kind"] == "parameter":
            ours, theirs = torch.tensor([e["values"], parameters[e["index"]]], dtype=torch.float64)
            errors["parameter"] = max(errors["parameter"], ((ours - theirs).norm() / theirs.norm()).item())
    states = {(e["rank"], e["digest"]) for e in events if e["kind"] == "state"}
    return errors | {"differ": len(states) - len({rank for rank, _ in states}) if states else -1}


def demo(n_steps: int = 12) -> None:
    """By hand == torchft == torchrun's way == one process, each with a rank killed in the middle of step 5."""
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first rank shows it, and starts ranks of its own
    with Laboratory() as laboratory, tempfile.TemporaryDirectory() as folder:
        ways = {
            "by hand, 2 groups of 1": ("train_by_hand", 2, 1, {"groups": 2}),
            "torchft, 2 groups of 2": ("train_replica", 2, 2, {"groups": 2}),
            "restart, 1 group of 2": ("train_elastic", 1, 2, {"folder": folder}),
        }
        for name, (worker, groups, ranks, options) in ways.items():
            kills = [kill(groups - 1, ranks - 1, step=5, after=0.03)]
            events = laboratory.run(worker, groups, ranks, kills, options=options | {"n_steps": n_steps})
            errors = against_one_process(events, n_steps)
            print(
                f"{name:23} against one process: loss {errors['loss']:.1e}, parameters {errors['parameter']:.1e}, "
                f"{errors['differ']} groups differ",
                flush=True,
            )
            if errors["differ"] or not 0 < max(errors["loss"], errors["parameter"]) < 1e-10:
                raise SystemExit(f"{name} differs by {errors}")


if __name__ == "__main__":
    _laboratory() if sys.argv[1:] == ["--laboratory"] else demo()
