"""PipeDream's graph.txt: what is read, in which order, what is dropped, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning.profile import ModelProfile, forward_order, parse_graph

DATA = Path(__file__).parent.parent / "data"
TIMES = "forward_compute_time=1.500, backward_compute_time=2.000"
SIZES = "activation_size=8.0, parameter_size=16.000"


def node(
    name: str, description: str = "ReLU(inplace)", times: str = TIMES, sizes: str = SIZES
) -> str:
    return f"{name} -- {description} -- {times}, {sizes}"


@pytest.mark.parametrize(
    ("name", "counts", "tensors", "forward_ms", "backward_ms", "parameters_mb", "activations_mb"),
    [
        ("alexnet", (23, 23), 8, 44.8, 40.5, 244.4, 1125),
        ("vgg16", (41, 41), 16, 233.9, 438.6, 553.4, 14682),
        ("resnet50", (177, 193), 107, 182.5, 260.9, 102.2, 19232),
        ("gnmt", (48, 58), 11, 33.5, 55.9, 775.1, 409),
    ],
)
def test_pipedreams_profiles(
    name: str,
    counts: tuple[int, int],
    tensors: int,
    forward_ms: float,
    backward_ms: float,
    parameters_mb: float,
    activations_mb: float,
) -> None:
    found = parse_graph((DATA / f"{name}.graph.txt").read_text())
    assert (len(found.nodes), len(found.edges)) == counts
    nodes = [node for node in found.nodes if not node.description.startswith("Input")]
    assert sum(node.gradient_bytes > 0 for node in nodes) == tensors
    assert sum(node.activation_bytes for node in nodes) / 1e6 == pytest.approx(
        activations_mb, abs=0.5
    )
    model = ModelProfile.from_graph(DATA / f"{name}.graph.txt")
    assert model.name == name
    assert model.forward_s * 1e3 == pytest.approx(forward_ms, abs=0.051)
    assert model.backward_s * 1e3 == pytest.approx(backward_ms, abs=0.051)
    assert model.gradient_bytes().sum() / 1e6 == pytest.approx(parameters_mb, abs=0.051)
    assert model.compute_s == model.forward_s + model.backward_s
    assert not [x for x in model.layers if x.description.startswith("Input")]
    used = {a for a, _ in model.edges or ()}
    assert not [x for x in model.layers if "__getitem__" in x.description and x.name not in used]
    assert ModelProfile.from_json(model.to_json()) == model


def test_what_is_accepted() -> None:
    text = "\n".join(
        [
            node("b", sizes="activation_size=[4.0; 6.0], parameter_size=0.000") + " -- stage_id=3",
            node("a", "Conv2d(3, 64, kernel_size=(3, 3))"),
            "",
            "\ta -- b",
        ]
    )
    found = parse_graph(text + "\n")
    assert [node.name for node in found.nodes] == ["b", "a"]
    assert found.nodes[0].activation_bytes == 10
    assert (found.nodes[1].forward_s, found.nodes[1].backward_s) == (0.0015, 0.002)
    assert found.nodes[1].description == "Conv2d(3, 64, kernel_size=(3, 3))"
    assert [node.name for node in found.pruned().nodes] == ["a", "b"]


def test_pruning_keeps_what_leads_where() -> None:
    """Chains of inputs and of unused items go as a whole; an item that is used stays."""
    lines = [
        node("n1", "Input0"),
        node("n2", "Input1"),
        node("n3"),
        node("n4", "__getitem__(0)"),
        node("n5", "__getitem__(1)"),
        node("n6", "__getitem__(0)"),
        node("n7"),
    ]
    pairs = [(3, 4), (1, 2), (2, 3), (3, 5), (5, 6), (4, 7), (1, 7)]
    pruned = parse_graph("\n".join(lines + [f"\tn{a} -- n{b}" for a, b in pairs])).pruned()
    assert [node.name for node in pruned.nodes] == ["n3", "n4", "n7"]
    assert pruned.edges == (("n3", "n4"), ("n4", "n7"))


@given(st.data())
def test_forward_order(data: st.DataObject) -> None:
    """A topological order, the same for every order of the lines where names have numbers."""
    count = data.draw(st.integers(1, 8))
    pairs = [p for p in itertools.combinations(range(count), 2) if data.draw(st.booleans())]
    numbers = data.draw(st.permutations(range(count)))
    names = [f"node{number}" for number in numbers]
    edges = [(names[a], names[b]) for a, b in pairs]
    order = forward_order(names, edges)
    assert sorted(order) == sorted(names)
    assert all(order.index(a) < order.index(b) for a, b in edges)
    shuffled = data.draw(st.permutations(names))
    assert forward_order(shuffled, data.draw(st.permutations(edges))) == order
    if not edges:
        assert order == [f"node{at}" for at in range(count)]


def test_cycles_are_named() -> None:
    edges = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"), ("d", "e")]
    with pytest.raises(ValueError, match=r"b -> c -> d -> b; unroll the loop"):
        forward_order(list("abcde"), edges)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"no nodes: expected lines '<id> -- "),
        (["node1 -- ReLU"], r"line 1, 'node1 -- ReLU': a node is .*got 2 parts"),
        ([node("a"), node("b") + " -- stage_id=x"], r"line 2, .*got 4 parts"),
        ([node("a"), node("a")], r"line 2, .*two nodes 'a'"),
        ([node("a", times="forward_compute_time=1")], r"lacks backward_compute_time"),
        ([node("a", times=TIMES + ", speed=3")], r"each once; got 'speed=3'"),
        ([node("a", times=TIMES + ", forward_compute_time=3")], r"got 'forward_compute_time=3'"),
        ([node("a", times=TIMES.replace("1.5", "x"))], r"forward_compute_time is a number or"),
        ([node("a", times=TIMES.replace("1.5", "-1.5"))], r"finite and at least 0, got '-1.500'"),
        ([node("a", sizes=SIZES.replace("8.0", "[8.0, 4]"))], r"list '\[a; b\]', got '\[8.0'"),
        (
            [node("a", sizes=SIZES.replace("8.0", "[8.0; ]"))],
            r"a list '\[a; b\]', got '\[8.0; \]'",
        ),
        ([node("a", sizes=SIZES.replace("8.0", "8.5"))], r"whole number of bytes, got 8.5"),
        ([node("a"), "\ta"], r"line 2, 'a': an edge is a tab and '<id> -- <id>'"),
        ([node("a"), "\ta -- a"], r"line 2, 'a -- a': an edge from a node to itself"),
        ([node("a"), "\ta -- b"], r"line 2: the edge names an unknown node 'b'"),
        (
            [node("a"), node("b"), "\ta -- b", "\ta -- b"],
            r"line 4, 'a -- b': this edge is already in line 3",
        ),
        ([node("a"), node("b"), "\ta -- b", "\tb -- a"], r"no cycles, .* a -> b -> a"),
        ([node("a", "Input")], r"at least one layer, got none"),
    ],
)
def test_bad_files(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"graph\.txt: .*{message}"):
        ModelProfile.from_graph(path)


def test_a_bare_graph_is_named_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "vgg11").mkdir()
    path = tmp_path / "vgg11" / "graph.txt"
    path.write_text(node("a"))
    assert ModelProfile.read(path).name == "vgg11"
