"""Scale out: README's commands for several nodes, run on hosts that are network namespaces joined by a virtual cable.

Each host has a name, an address and a loopback of its own, and sees the other only through the cable; the disk is
shared. A host dies by SIGKILL of all that runs in it, with the cable pulled or not.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from minititan.checkpoint import load
from minititan.fault_tolerance import torchrun_store
from minititan.lab.launch import launch
from minititan.model import Transformer
from minititan.optimizer import build_adamw
from minititan.train import check, parse, train

REPO = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (REPO / "README.md").read_text(), re.DOTALL | re.MULTILINE)
(COMMAND,) = (block for block in BLOCKS if "--nnodes 2" in block)
(GROUP,) = (block for block in BLOCKS if "--fault-tolerance.name" in block)
(SCRIPT,) = (block for block in BLOCKS if block.startswith("#!"))
ARGUMENTS = (
    "--model.dim 32 --model.n-layers 2 --model.n-heads 4 --model.n-kv-heads 2 --model.ffn-dim 48 --dtype float64 "
    f"--global-batch 8 --seq-len 16 --eval-batches 1 --warmup-steps 1 --log-every 1 --data {csv.__file__}"
).split()


def in_folder(path: Path, **variables: str) -> dict:
    """Where README's commands run: a folder with .venv, and stubs first on PATH."""
    if not (path / ".venv").exists():
        (path / ".venv").symlink_to(sys.prefix)
    names = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMP"))}
    search = f"{path / 'stubs'}:{os.environ['PATH']}"
    names |= {"PATH": search, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"} | variables
    return {"cwd": path, "env": names, "stdin": subprocess.DEVNULL, "text": True}


def stub(path: Path, name: str, body: str) -> None:
    (path / "stubs").mkdir(exist_ok=True)
    (path / "stubs" / name).write_text(f"#!/bin/bash\n{body}\n")
    (path / "stubs" / name).chmod(0o755)


def rows(path: Path) -> list[dict]:
    return list(csv.DictReader(path.read_text().splitlines()))


# ------------------------------------------------------------------------------------------------- one host, no root


@pytest.mark.parametrize("text", [COMMAND, SCRIPT, GROUP], ids=["command", "script", "group"])
def test_what_the_readme_says_is_bash_and_its_options_exist(text):
    from torch.distributed.run import get_args_parser

    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    words = re.sub(r"\\\n", " ", text).split("torchrun ")[1].splitlines()[0]
    words = re.sub(r"\$\(\([^)]*\)\)", "29400", words)
    words = [re.sub(r"\$\{?\w+\}?", "2", word.strip('"')) for word in words.split() if word != '"$@"']
    options = get_args_parser().parse_args(words)
    assert options.module and options.training_script == "minititan.train"
    assert (options.nnodes, options.rdzv_backend) == (("1:1", "static") if text == GROUP else ("2", "c10d"))
    config = parse(options.training_script_args)
    assert options.max_restarts > 0 and config.checkpoint
    assert config.fault_tolerance.lighthouse == ("http://node0:29510" if text == GROUP else None)


def test_the_script_runs_on_one_node_and_asks_for_another_turn_when_it_failed(tmp_path):
    stub(tmp_path, "scontrol", f'echo "$@" >> {tmp_path}/asked; [ "$1" = requeue ] || echo localhost')
    stub(tmp_path, "srun", f'echo "$@" >> {tmp_path}/asked; while [[ $1 == -* ]]; do shift; done; exec "$@"')
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here[0-0]", "SLURM_GPUS_ON_NODE": "1"}
    (tmp_path / "job").write_text(SCRIPT)
    places = in_folder(tmp_path, **slurm)
    steps = [*ARGUMENTS, "--steps", "2", "--checkpoint", "kept"]
    done = subprocess.run(["bash", "job", *steps], capture_output=True, timeout=120, **places)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["step-00000002"]
    assert "show hostnames here[0-0]" in (tmp_path / "asked").read_text()

    stub(tmp_path, "srun", "exit 3")  # torchrun has used up its restarts, or a node has died
    for turn, asks in (("", True), ("2", True), ("9", False)):
        (tmp_path / "asked").write_text("")
        places["env"]["SLURM_RESTART_COUNT"] = turn
        if not turn:
            del places["env"]["SLURM_RESTART_COUNT"]
        done = subprocess.run(["bash", "job"], capture_output=True, timeout=20, **places)
        assert done.returncode == 3 and ("requeue 4711" in (tmp_path / "asked").read_text()) == asks


def test_nodes_that_may_restart_must_not_share_a_store(monkeypatch):
    for name, value in {"RANK": 0, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_MAX_RESTARTS": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 nodes with --max-restarts 3 .*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        torchrun_store()


# ------------------------------------------------------------------------------------------------- two hosts


class Host:
    """A network namespace with a name. Everything in it ends with it."""

    def __init__(self, namespace: str, number: int, folder: Path):
        self.namespace, self.name, self.device = namespace, f"node{number}", f"eth{number}"
        self.folder, self.log = folder, folder / f"{self.name}.log"
        # its own /etc/hosts and host name, in mount and UTS namespaces that end with the command
        enter = 'mount --bind "$0" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'
        self.enter = ["ip", "netns", "exec", namespace, "unshare", "--mount", "--uts", "sh", "-c", enter]
        self.enter += [str(folder / "hosts"), self.name]

    def start(self, command: str, **variables: str) -> subprocess.Popen:
        variables |= {"GLOO_SOCKET_IFNAME": self.device}
        with open(self.log, "a") as log:
            outputs = {"stdout": log, "stderr": subprocess.STDOUT}
            return subprocess.Popen(
                [*self.enter, "bash", "-c", command], **outputs, **in_folder(self.folder, **variables)
            )

    def kill(self) -> int:
        """SIGKILL to every process in it, until there is none. How many there were."""
        killed = set()
        while found := subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True
        ).stdout.split():
            for pid in map(int, found):
                killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        return len(killed)

    def cable(self, state: str) -> None:
        subprocess.run(["ip", "-n", self.namespace, "link", "set", self.device, state], check=True)

    def received(self) -> int:
        """Bytes that came through the cable."""
        command = ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", self.device]
        (told,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return told["stats64"]["rx"]["bytes"]


@pytest.fixture
def hosts(tmp_path):
    """node0 and node1 at 10.213.0.1 and .2, or a skip that says what is not permitted."""
    if missing := [tool for tool in ("ip", "unshare") if not shutil.which(tool)]:
        pytest.skip(f"two hosts need Linux and {' and '.join(missing)} (packages iproute2, util-linux)")
    pair = [Host(f"minititan-{os.getpid()}-{n}", n, tmp_path) for n in range(2)]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.213.0.1 node0\n10.213.0.2 node1\n")
    a, b = (host.namespace for host in pair)
    commands = [f"ip netns add {a}", f"ip netns add {b}"]
    commands += [f"ip link add eth0 netns {a} type veth peer name eth1 netns {b}"]
    for n, name in enumerate((a, b)):
        commands += [f"ip -n {name} addr add 10.213.0.{n + 1}/24 dev eth{n}", f"ip -n {name} link set eth{n} up"]
        commands += [f"ip -n {name} link set lo up"]
    commands += [" ".join(pair[1].enter[:-5]) + " true"]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"two hosts are not permitted here: {command}: {done.stderr.strip()}")
        yield pair
    finally:
        for host in pair:
            if Path("/run/netns", host.namespace).exists():
                host.kill()
                subprocess.run(["ip", "netns", "del", host.namespace], check=True)


def wait_for(what, seconds: float = 200.0, logs=()):
    until = time.monotonic() + seconds
    while not (value := what()):
        told = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
        assert time.monotonic() < until, f"nothing after {seconds} s\n{told}"
        time.sleep(0.02)
    return value


def ended(processes, hosts) -> list[int]:
    logs = [host.log for host in hosts]
    return wait_for(lambda: all(p.poll() is not None for p in processes) and [p.poll() for p in processes], logs=logs)


def one_process(*more: str) -> tuple[list[float], list[float]]:
    result = launch(train, parse([*ARGUMENTS, *more, "--log-every", "0"]), ranks=1, timeout=200)[0]
    return result.losses, result.grad_norms


def check_rows(path: Path, losses: list[float], norms: list[float]) -> None:
    table = rows(path)
    assert [int(row["step"]) for row in table] == list(range(1, len(losses) + 1))
    assert [float(row["loss"]) for row in table] == pytest.approx(losses, rel=1e-10, abs=0)
    assert [float(row["grad_norm"]) for row in table] == pytest.approx(norms, rel=1e-10, abs=0)


LAYOUTS = {
    "fsdp": "--parallel.dp-shard 4",
    "hsdp": "--parallel.dp-replicate 2 --parallel.dp-shard 2",
    "fsdp tp": "--parallel.dp-shard 2 --parallel.tp 2",
    "pp": "--parallel.pp 2 --parallel.dp-shard 2 --accumulate 2",
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_hosts_compute_what_one_process_does(hosts, tmp_path, layout):
    """README's script, in which srun starts its command on each host."""
    node0, node1 = hosts
    stub(tmp_path, "scontrol", "printf 'node0\\nnode1\\n'")
    (tmp_path / "job").write_text(SCRIPT.replace("srun --kill-on-bad-exit=1 ", ""))  # here each host runs the line
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "2"}
    options = [*ARGUMENTS, "--steps", "4", *layout.split(), "--csv", "rows.csv", "--checkpoint", "kept"]
    processes = [host.start(" ".join(["bash job", *options]), **slurm) for host in hosts]
    assert ended(processes, hosts) == [0, 0]
    check_rows(tmp_path / "rows.csv", *one_process("--steps", "4"))
    summary = json.loads(node0.log.read_text().splitlines()[-1])
    assert all(host.received() > 4 * summary["n_parameters"] for host in hosts), "it did not pass through the cable"
    assert "step" not in node1.log.read_text()


@pytest.mark.full
@pytest.mark.parametrize("death", ["killed", "cable pulled"])
def test_a_node_dies_and_rejoins(hosts, tmp_path, death):
    """README's command. The other node's torchrun lives; all ranks go on from the last checkpoint, to the same losses.

    Killed: its kernel closes the sockets, so the other ranks fail at once and wait. With the cable pulled nothing is
    heard of it: the others wait in a collective, until the node that rejoins makes torchrun start them again.
    """
    node0, node1 = hosts
    n_steps, every = 40, 5
    command = COMMAND.replace("--nproc-per-node 8", "--nproc-per-node 2")
    assert command != COMMAND
    command = command.strip() + " " + " ".join(ARGUMENTS)
    command += f" --steps {n_steps} --csv rows.csv --checkpoint kept --checkpoint-every {every} --keep-last 99"
    first, second = (host.start(command) for host in hosts)
    logs = [host.log for host in hosts]
    wait_for(
        lambda: (tmp_path / "kept" / "step-00000010").exists() and len(rows(tmp_path / "rows.csv")) > 12, logs=logs
    )
    if death == "cable pulled":
        node1.cable("down")
    assert node1.kill() >= 3  # torchrun and its ranks
    second.wait()
    done = len(rows(tmp_path / "rows.csv"))
    assert 10 <= done < n_steps and first.poll() is None
    if death == "cable pulled":
        node1.cable("up")
    second = node1.start(command)
    assert ended([first, second], hosts) == [0, 0]
    check_rows(tmp_path / "rows.csv", *one_process("--steps", str(n_steps)))
    steps = [int(step) for step in re.findall(r"^step +(\d+) ", node0.log.read_text(), re.MULTILINE)]
    again = [i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]]
    (start,) = again or [steps.index(done)]  # or it died just when a checkpoint was complete
    assert steps[:start] == list(range(start)) and steps[start:] == list(range(steps[start], n_steps))
    assert 10 <= steps[start] <= start and steps[start] % every == 0, "from a checkpoint, once"


# ------------------------------------------------------------------------------------------------- groups that heal


@pytest.fixture
def jobs(tmp_path):
    """Starts torchruns; at the end none of their processes is left."""
    started = []

    def start(command: str, log: str) -> subprocess.Popen:
        with open(tmp_path / log, "a") as out:
            outputs = {"stdout": out, "stderr": subprocess.STDOUT}
            places = in_folder(tmp_path, RUST_LOG="error", OMP_NUM_THREADS="1")
            started.append(subprocess.Popen(command.split(), **outputs, **places))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()


def whole_state(folder: Path, config) -> dict:
    """The newest checkpoint, in one process."""
    model = Transformer(config.model).double()
    optimizer = build_adamw(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    load(folder, model, optimizer)
    states = {f"{n} {k}": t for n, p in model.named_parameters() for k, t in optimizer.state[p].items()}
    return dict(model.named_parameters()) | states


@pytest.mark.full
@pytest.mark.parametrize("layout", ["--parallel.dp-shard 2", "--parallel.tp 2"], ids=["fsdp", "tp"])
def test_a_killed_group_heals_from_its_peer(jobs, tmp_path, layout):
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 10_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
    groups, work = (
        [],
        [*ARGUMENTS, "--steps", "200", "--seq-len", "64", "--global-batch", "24"],
    )  # longer than a relaunch
    logs = [tmp_path / f"{n}.log" for n in range(2)]
    for n in range(2):
        command = f".venv/bin/torchrun --standalone --nproc-per-node 2 --max-restarts 1 -m minititan.train {layout} "
        command += f"--fault-tolerance.lighthouse {lighthouse.address()} --fault-tolerance.name group_{n} "
        command += f"--csv {n}.csv --checkpoint kept{n} --checkpoint-every 1000 {' '.join(work)}"
        groups.append(jobs(command, f"{n}.log"))
    wait_for(lambda: (tmp_path / "1.csv").exists() and len(rows(tmp_path / "1.csv")) > 20, logs=logs)
    ranks = psutil.Process(groups[1].pid).children(recursive=True)
    next(rank for rank in ranks if rank.environ().get("RANK") == "1").kill()
    wait_for(lambda: all(p.poll() is not None for p in groups), logs=logs)
    lighthouse.shutdown()
    assert [p.poll() for p in groups] == [0, 0], logs[1].read_text()[-3000:]
    check_rows(tmp_path / "0.csv", *one_process(*work[-6:]))  # the survivor's, each step once
    assert 20 < int(rows(tmp_path / "1.csv")[0]["step"]) < 200, "it came back while the other one went on"
    healed, survived = (whole_state(tmp_path / f"kept{n}", parse(work)) for n in (1, 0))
    assert len(survived) > 40 and all(torch.equal(healed[name], t) for name, t in survived.items())


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        ("--fault-tolerance.groups 1", ["groups 1", "nobody is left"]),
        ("--parallel.pp 2 --accumulate 2", ["pp 2", "given up the step"]),
        ("--model.n-experts 4 --model.expert-ffn-dim 16", ["4 experts", "biases"]),
        ("--fault-tolerance.groups 3 --global-batch 8", ["global_batch 8", "1 to 3 groups", "multiple of 12"]),
    ],
)
def test_fault_tolerance_refuses_what_cannot_work(change, pieces):
    config = parse([*ARGUMENTS, "--fault-tolerance.lighthouse", "http://host:29510", *change.split()])
    with pytest.raises(ValueError) as error:
        check(config, 2)
    assert all(piece in str(error.value) for piece in pieces), str(error.value)
