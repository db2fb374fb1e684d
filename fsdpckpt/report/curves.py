"""Draws values by layer: a curve for each stack of layers and each kind of tensor."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpckpt.report.figures import clipped

WIDTH, HEIGHT = 440, 170
LEFT, RIGHT, TOP, BOTTOM = 62, 8, 10, 22
FEWEST_LAYERS = 3  # of a curve
MAX_CURVES = 12
_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.)")


@dataclass(frozen=True, slots=True)
class Line:
    """``name``: in the legend. ``kind``: its class in the style. ``values``: of each layer, None where it has none."""

    name: str
    kind: str
    values: Sequence[float | None]


def layer_of(name: str) -> tuple[str, int] | None:
    """The stack that a parameter's layer is in, and its number: ``("model.layers", 3)``; None if it is in none."""
    match = _LAYER.search(name)
    if match is None or len(match[1]) > 6:
        return None
    return name[: match.start()] or "layers", int(match[1])


def curve(title: str, layers: Sequence[int], lines: Sequence[Line]) -> dict[str, Any] | None:
    """For the template, a drawing with a logarithmic axis; None if there is nothing above 0."""
    shown = [value for line in lines for value in line.values if value is not None and 0 < value < math.inf]
    if not shown or len(layers) < 2:
        return None
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    high = max(high, low + 1)

    def x_of(layer: int) -> float:
        return LEFT + (layer - layers[0]) / (layers[-1] - layers[0]) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return TOP + (high - math.log10(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    drawn = []
    for line in lines:
        runs: list[list[str]] = [[]]  # a layer without a value above 0 interrupts the line
        dots = []
        for layer, value in zip(layers, line.values, strict=True):
            if value is None or not 0 < value < math.inf:
                runs.append([])
                continue
            x, y = x_of(layer), y_of(value)
            runs[-1].append(f"{x:.1f},{y:.1f}")
            dots.append((f"{x:.1f}", f"{y:.1f}", f"layer {layer}: {line.name} {value:.3g}"))
        points = [" ".join(run) for run in runs if run]
        drawn.append({"name": line.name, "kind": line.kind, "points": points, "dots": dots})
    every = max(1, -(-(high - low) // 5))
    ticks = [(f"{y_of(10.0**power):.1f}", f"1e{power}") for power in range(low, high + 1, every)]
    ends = [(f"{x_of(layer):.1f}", str(layer)) for layer in (layers[0], layers[-1])]
    return {
        "title": clipped(title),
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "bottom": HEIGHT - 6,
        "lines": drawn,
        "ticks": ticks,
        "ends": ends,
    }


@dataclass(slots=True)
class LayerSums:
    """What is known of all tensors of one kind in one layer."""

    squares: float = 0.0
    numel: int = 0
    largest: float = 0.0

    @property
    def rms(self) -> float | None:
        return math.sqrt(self.squares / self.numel) if self.numel else None


def layer_curves(values: Iterable[tuple[str, str, float, int, float]]) -> list[dict[str, Any]]:
    """Curves of the root mean square and of the largest magnitude.

    ``values``: of each tensor its kind, its parameter's name, its norm, its number of elements, its largest magnitude.
    """
    sums: dict[tuple[str, str], dict[int, LayerSums]] = {}
    for kind, name, norm, numel, largest in values:
        place = layer_of(name)
        if place is None:
            continue
        stack, layer = place
        of_layer = sums.setdefault((stack, kind), {}).setdefault(layer, LayerSums())
        of_layer.squares += norm * norm
        of_layer.numel += numel
        of_layer.largest = max(of_layer.largest, largest)
    curves = []
    for (stack, kind), by_layer in sums.items():
        layers = sorted(by_layer)
        if len(layers) < FEWEST_LAYERS:
            continue
        lines = [
            Line("RMS", "line-rms", [by_layer[layer].rms for layer in layers]),
            Line("max", "line-max", [by_layer[layer].largest for layer in layers]),
        ]
        drawn = curve(f"{kind} in {stack}", layers, lines)
        if drawn is not None:
            curves.append(drawn)
    return curves[:MAX_CURVES]
