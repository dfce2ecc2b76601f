"""Cold compile time against depth: writes figures/regional_compile.json, which notebook 14 draws.

python tests/bench/compile_time.py [LAYERS ...]     default 4 8 16 32; minutes, on a quiet machine
"""

import json
import os
import pathlib
import platform
import sys
import time
from dataclasses import asdict, replace

import torch

from minititan.meta_init import materialize, on_meta
from minititan.model import PRESETS, Transformer
from minititan.regional_compile import HOW, measure_compile

TARGET = pathlib.Path(__file__).parents[2] / "figures" / "regional_compile.json"


def main(depths: list[int]) -> None:
    rows = []
    for n_layers in depths:
        config = replace(PRESETS["debug"], n_layers=n_layers)
        model = materialize(on_meta(lambda config=config: Transformer(config)), "cpu", seed=0)
        for how in HOW:
            cost = measure_compile(model, torch.arange(256).view(2, 128), how, timeout=1800)
            rows.append({"n_layers": n_layers} | asdict(cost))
            print(
                f"{n_layers:3} layers, {how:6}: cold {cost.cold_s:6.1f} s, then {cost.warm_s * 1e3:6.1f} ms a step,",
                end=" ",
            )
            print(f"{cost.graphs} graphs, compiler's start {cost.start_s:.1f} s", flush=True)
    about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "machine": platform.machine()}
    about |= {"cores": os.cpu_count(), "model": "debug", "batch": 2, "seq_len": 128}
    TARGET.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [4, 8, 16, 32])
