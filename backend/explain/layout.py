"""Where the nodes of a graph stand in its picture: in layers, each below all that it reads.

    rank each node by its longest path -> bend long edges at every layer between -> order the layers
    by the means of their neighbours -> move what stands in a layer to its neighbours

Positions are those of least squares that keep the order and the gaps of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Point = tuple[float, float]
    Edge = tuple[int, int]

GAP = 14.0  # between neighbours in a layer
LAYERS_APART = 34.0  # between the boxes of two layers
BEND = 6.0  # the room of an edge that passes a layer
# How much more a bend insists on its place than a node: long edges are to be straight.
STIFFNESS = 4.0
SWEEPS = 6
# Steps of all sweeps together; larger pictures get fewer sweeps, and two at least.
MOST_STEPS = 150_000


@dataclass(frozen=True)
class Layout:
    """centres: of each node. paths: of each edge the points that it passes, from the bottom of a
    box to the top of another. The picture is width by height, and begins at (0, 0).
    """

    centres: list[Point]
    paths: list[list[Point]]
    width: float
    height: float


def layout(sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> Layout:
    """Places boxes of these widths and heights.

    edges: (from, to), each from an earlier node to a later one.

    Raises:
        ValueError: for an edge that goes back.
    """
    layers = _Layers(sizes, edges)
    sweeps = max(2, min(SWEEPS, MOST_STEPS // max(1, len(layers.width))))
    layers.order(sweeps)
    return layers.placed(sweeps)


def ranks(count: int, edges: Sequence[Edge]) -> list[int]:
    """The layer of each node: the length of the longest path to it. What nothing else needs on the
    way, such as a parameter that is used once, stands directly above where it is used.

    Raises:
        ValueError: for an edge that goes back.
    """
    reads, users = _neighbours(count, edges)
    rank = [0] * count
    for node in range(count):
        rank[node] = max((rank[arg] + 1 for arg in reads[node]), default=0)
    is_free = [False] * count
    for node in range(count):
        is_free[node] = all(is_free[arg] and len(users[arg]) == 1 for arg in reads[node])
    for node in reversed(range(count)):
        if is_free[node] and users[node]:
            rank[node] = min(rank[user] for user in users[node]) - 1
    return rank


def _neighbours(count: int, edges: Sequence[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """What each node reads, and what reads it."""
    reads: list[list[int]] = [[] for _ in range(count)]
    users: list[list[int]] = [[] for _ in range(count)]
    for start, end in edges:
        if not 0 <= start < end < count:
            raise ValueError(
                f"expected edges to later nodes, of {count}, found one from {start} to {end}"
            )
        reads[end].append(start)
        users[start].append(end)
    return reads, users


class _Layers:
    """Nodes and bends, each with a number, and the layers that they stand in.

    All edges of a node that pass a layer are bent there together.
    """

    def __init__(self, sizes: Sequence[tuple[float, float]], edges: Sequence[Edge]) -> None:
        self.sizes, self.edges = sizes, edges
        self.rank = ranks(len(sizes), edges)
        self.width = [width for width, _ in sizes]
        self.weight = [1.0] * len(sizes)
        self.above: list[list[int]] = [[] for _ in sizes]
        self.below: list[list[int]] = [[] for _ in sizes]
        self.bends: list[list[int]] = [[] for _ in sizes]
        for start, end in edges:
            self.connect(start, end)
        self.layers: list[list[int]] = [[] for _ in range(max(self.rank, default=-1) + 1)]
        for node, rank in enumerate(self.rank):
            self.layers[rank].append(node)
        self.x = [0.0] * len(self.width)

    def connect(self, start: int, end: int) -> None:
        """Joins two nodes, through bends in the layers between."""
        bends, between = self.bends[start], self.rank[end] - self.rank[start] - 1
        while len(bends) < between:
            before = bends[-1] if bends else start
            bends.append(self.bend(self.rank[before] + 1))
            self.join(before, bends[-1])
        self.join(bends[between - 1] if between else start, end)

    def bend(self, rank: int) -> int:
        self.rank.append(rank)
        self.width.append(BEND)
        self.weight.append(STIFFNESS)
        self.above.append([])
        self.below.append([])
        return len(self.rank) - 1

    def join(self, one: int, other: int) -> None:
        if other not in self.below[one]:
            self.below[one].append(other)
            self.above[other].append(one)

    def order(self, sweeps: int) -> None:
        """Orders each layer by the means of its neighbours' places, downwards and upwards."""
        place = [0.0] * len(self.width)
        self.number(place)
        for sweep in range(sweeps):
            down = sweep % 2 == 0
            neighbours = self.above if down else self.below
            for layer in self.layers if down else reversed(self.layers):
                for node in layer:
                    near = neighbours[node]
                    if near:
                        place[node] = sum(place[other] for other in near) / len(near)
                layer.sort(key=place.__getitem__)
                self.number(place, layer)

    def number(self, place: list[float], *layers: list[int]) -> None:
        """Each node's place in its layer, from -1/2 to 1/2 of what it holds."""
        for layer in layers or self.layers:
            middle = (len(layer) - 1) / 2
            for k, node in enumerate(layer):
                place[node] = k - middle

    def placed(self, sweeps: int) -> Layout:
        """Moves nodes to their neighbours without changing the order, and puts layers below each
        other.
        """
        for layer in self.layers:
            self.settle(layer, [0.0] * len(layer))
        for sweep in range(sweeps):
            for layer in self.layers if sweep % 2 == 0 else reversed(self.layers):
                self.settle(layer, [self.wanted(node) for node in layer])
        return self.drawn()

    def wanted(self, node: int) -> float:
        near = [*self.above[node], *self.below[node]]
        if not near:
            return self.x[node]
        total = sum(self.weight[other] for other in near)
        return sum(self.x[other] * self.weight[other] for other in near) / total

    def settle(self, layer: Sequence[int], wanted: Sequence[float]) -> None:
        """The places of a layer nearest to those that are wanted, side by side in its order.

        Less what those before it take, a place may not be smaller than the one before: runs of
        equal ones are merged until that holds.
        """
        offset, offsets = 0.0, []
        runs: list[tuple[float, float, int]] = []  # weight, mean, how many
        for k, node in enumerate(layer):
            if k:
                offset += (self.width[layer[k - 1]] + self.width[node]) / 2 + GAP
            offsets.append(offset)
            weight, mean, count = self.weight[node], wanted[k] - offset, 1
            while runs and runs[-1][1] >= mean:
                other, at, more = runs.pop()
                mean = (mean * weight + at * other) / (weight + other)
                weight, count = weight + other, count + more
            runs.append((weight, mean, count))
        places = [mean for _, mean, count in runs for _ in range(count)]
        for node, place, offset in zip(layer, places, offsets, strict=True):
            self.x[node] = place + offset

    def drawn(self) -> Layout:
        left = min((x - w / 2 for x, w in zip(self.x, self.width, strict=True)), default=0.0)
        right = max((x + w / 2 for x, w in zip(self.x, self.width, strict=True)), default=0.0)
        count, y, middle = len(self.sizes), 0.0, []
        for layer in self.layers:
            height = max(self.sizes[node][1] if node < count else 0.0 for node in layer)
            middle.append(y + height / 2)
            y += height + LAYERS_APART
        at = [(x - left, middle[rank]) for x, rank in zip(self.x, self.rank, strict=True)]
        paths = []
        for start, end in self.edges:
            bends = self.bends[start][: self.rank[end] - self.rank[start] - 1]
            (x0, y0), (x1, y1) = at[start], at[end]
            top, bottom = y0 + self.sizes[start][1] / 2, y1 - self.sizes[end][1] / 2
            paths.append([(x0, top), *(at[bend] for bend in bends), (x1, bottom)])
        return Layout(at[:count], paths, right - left, max(0.0, y - LAYERS_APART))
