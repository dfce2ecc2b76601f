"""From the call to the first finished all_reduce: launch, spawn, torchrun, and ipyparallel where it is installed.

python tests/bench/launch_latency.py            with `pip install ipyparallel` before, it takes part
"""

from minititan.lab._benchmark import measure, show

if __name__ == "__main__":
    show(measure(ranks=4, repeats=3), ranks=4)
