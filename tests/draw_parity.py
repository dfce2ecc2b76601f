"""Draws figures/parity.svg: every factoring of 8 ranks into five axes, measured against one process. Minutes.

python tests/draw_parity.py
"""

from test_parity import FACTORINGS, TOLERANCE, compare, layout

from minititan.lab import draw


def main() -> None:
    errors = compare([layout(*factors) for factors in FACTORINGS])
    names = {"losses": "loss", "grad_norms": "clipped norm", "gradients": "gradients", "updated": "parameters"}
    shown = {name: {names[k]: v for k, v in row.items() if k in names} for name, row in errors.items()}
    title = f"{len(shown)} layouts of 8 ranks, 3 AdamW steps in float64: the largest error of each kind"
    draw.save(draw.parity(shown, TOLERANCE, title), "parity")


if __name__ == "__main__":
    main()
