"""Files of plans, partitions, profiles and clusters: there and back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_pipe.planning._checks import Document
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.stages import Partition, Stage

JUMP = CommModel((0, 8192), (8e-5, 9e-4), (1.5e-8, 3e-9), error=0.03)
DEEP = Network(Link(3e-5, 8e-10), "double-binary-tree", 1e-11, 8, Link(5e-6, 1e-11))
STAGES = (Stage(("a",), 1, 0.5, 64, 0, 8, 128, 0.5), Stage(("b",), 2, 1.0, 0, 8, 0, 64, 0.5))
LAYERS = (LayerProfile("a", 8, 0.5), LayerProfile("b", 0, 0.25))
GOOD: dict[str, Document] = {
    "plan": Plan((("a", "b"), ("c",)), "overlap", 1.5, 0.5, order=(1, 0, 0)),
    "partition": Partition(STAGES, 3, 0.5, 1.5, 0.5, "paper", (2, 1), in_transit=1),
    "profile": ModelProfile(LAYERS, (("a", "b"),)),
    "cluster": Cluster(8, DEEP),
}
_any = pytest.mark.parametrize("kind", GOOD)


def edited(kind: str, changes: dict[str, Any]) -> str:
    """The document of a kind with other values, by their path; ... leaves a key out."""
    data = json.loads(GOOD[kind].to_json())
    for path, value in changes.items():
        *where, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place = data
        for part in where:
            place = place[part]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return json.dumps(data)


@_any
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    GOOD[kind].save(path)
    assert type(GOOD[kind]).load(path) == GOOD[kind]


def test_what_was_not_known_before_may_be_left_out() -> None:
    assert "order" not in json.loads(Plan((("a",),), "given").to_json())
    early = edited("partition", {"in_transit": ..., "simulated_s": ...})
    found = Partition.from_json(early)
    assert (found.in_transit, found.simulated_s) == (0, None)
    assert Partition.from_json(found.to_json()) == found
    assert "in_transit" not in json.loads(found.to_json())
    layers = [{"name": "a", "gradient_bytes": 8, "backward_s": 0.5}]
    bare = json.dumps({"schema": "hvd_pipe.profile/1", "layers": layers})
    assert ModelProfile.from_json(bare) == ModelProfile((LayerProfile("a", 8, 0.5),))


@_any
def test_what_is_no_such_document(kind: str, tmp_path: Path) -> None:
    cls, path = type(GOOD[kind]), tmp_path / "bad.json"
    for text, message in (
        ("{", "this is no JSON"),
        ("[]", r'expected a JSON object with a "schema" key'),
        (edited(kind, {"schema": "hvd_pipe.other/9"}), r"unknown schema 'hvd_pipe.other/9'.*/1'"),
        (edited(kind, {"extra": 1}), r"unknown keys \['extra'\]"),
        (json.dumps({"schema": f"hvd_pipe.{kind}/1"}), "lacks the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            cls.from_json(text)
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.json: .*{message}"):
            cls.load(path)
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=rf"bad\.json: this is no .*{kind}"):
        cls.load(path)


@pytest.mark.parametrize(("suffix", "what"), [("csv", "trace"), ("txt", "graph")])
def test_a_picture_is_no_profile(suffix: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=rf"model\.{suffix}: this is no {what}, but binary data"):
        ModelProfile.read(path)


ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("plan", {"buckets": []}, "at least one bucket, got none"),
    ("plan", {"buckets": [["a"], [], ["b"]]}, r"must not be empty, but these are: \[1\]"),
    ("plan", {"buckets": [["a", "b"], ["a"]]}, r"planned twice: \['a'\]"),
    ("plan", {"buckets": ["a", "b"]}, "list of lists of tensor names"),
    ("plan", {"buckets": [[1]]}, "list of lists of tensor names"),
    ("plan", {"method": None}, r"\"method\" is a string, got None"),
    ("plan", {"predicted_s": "1"}, r"\"predicted_s\" is a number of seconds or null, got '1'"),
    ("plan", {"predicted_s": -1.0}, "predicted_s must be finite and at least 0 seconds, got -1"),
    ("plan", {"exposed_s": float("nan")}, "exposed_s must be finite .*got nan"),
    ("plan", {"order": "10"}, '"order" is a list of bucket numbers or null'),
    ("plan", {"order": [0, True]}, '"order" is a list of bucket numbers or null'),
    ("plan", {"order": [0, 1.0]}, '"order" is a list of bucket numbers or null'),
    ("partition", {"stages": 3}, '"stages" and "in_flight" are lists'),
    ("partition", {"stages": [], "in_flight": []}, "at least one stage"),
    ("partition", {"in_flight": [1]}, "got 2 stages and 1"),
    ("partition", {"stages.0": 3}, "stage 0 is a JSON object, got int"),
    ("partition", {"stages.1": {}}, r"stage 1 lacks the keys \['activation_in_b"),
    ("partition", {"stages.0.layers": []}, 'stage 0: "layers" is a list of names and not empty'),
    ("partition", {"stages.0.layers": [1]}, 'stage 0: "layers" is a list of names'),
    ("partition", {"stages.0.replicas": 1.5}, 'stage 0: "replicas" is an integer, got 1.5'),
    ("partition", {"stages.0.time_s": "1"}, "\"time_s\" is a number of seconds, got '1'"),
    ("partition", {"workers": None}, '"workers" is an integer, got None'),
    ("partition", {"in_transit": -1}, "in_transit must be at least 0"),
    ("partition", {"in_transit": 0.5}, '"in_transit" is an integer'),
    ("partition", {"simulated_s": "fast"}, '"simulated_s" is a number of seconds'),
    ("profile", {"edges": 3}, r"\"edges\" is a list of pairs of layer names"),
    ("profile", {"edges": [["a"]]}, r"\"edges\" is a list of pairs"),
    ("profile", {"edges": [["a", 1]]}, r"\"edges\" is a list of pairs"),
    ("profile", {"edges": [["a", "x"]]}, "unknown layer 'x'"),
    ("profile", {"batch": "32"}, "batch is an integer of at least 1, or None, got '32'"),
    ("profile", {"layers": {}}, r"\"layers\" is a list, got dict"),
    ("profile", {"layers.0": 3}, "layer 0 is a JSON object, got int"),
    (
        "profile",
        {"layers.1": {"name": "b"}},
        r"layer 1 lacks the keys \['backward_s'",
    ),
    ("profile", {"layers.0.backward_s": -1}, "backward_s must be finite and at least 0 seconds"),
    ("cluster", {"workers": "8"}, "workers must be an int, got '8'"),
    ("cluster", {"workers": 0}, "workers must be at least 1, got 0"),
    ("cluster", {"network": []}, "a network is a JSON object, got list"),
    ("cluster", {"network.speed": 1}, r"a network lacks .* unknown keys \['speed'\]"),
    ("cluster", {"network.link": ...}, "needs a link"),
    ("cluster", {"network.link": 3}, "network's link .* is a JSON object, got int"),
    ("cluster", {"network.link": {"alpha": 1}}, r"network's link .* lacks the keys \['beta'\]"),
    ("cluster", {"network.link": {"bandwidth": 10}}, "is a text with a unit, .* got 10"),
    ("cluster", {"network.link": {"bandwidth": "10GB"}}, r"do you mean 10GB/s or 10gbit\?"),
    ("cluster", {"network.link.alpha": "x"}, "link's alpha must be a number .*got 'x'"),
    ("cluster", {"network.link.alpha": -1}, "link's alpha must be finite and not negative"),
    ("cluster", {"network.algorithm": []}, "algorithm must be one of ring"),
    ("cluster", {"network.inside": ...}, "per_node = 8 workers a machine need inside"),
    ("cluster", {"network.per_node": 3}, "8 workers do not fill machines of 3: take 6 or 9"),
    ("cluster", {"network.measured": {}}, "a CommModel lacks the keys"),
    ("cluster", {"network.measured": JUMP.to_json()}, "measured and measured_workers go together"),
    (
        "cluster",
        {"network.measured": {**JUMP.to_json(), "slopes": 3}, "network.measured_workers": 2},
        "a CommModel holds lists of numbers",
    ),
    ("cluster", {"speeds": 5}, "speeds is a list of numbers, got 5"),
    ("cluster", {"speeds": [1, 2]}, "2 numbers for 8 workers"),
    ("cluster", {"speeds": ["a"] * 8}, "speed must be a number .*got 'a'"),
    ("cluster", {"memory_bytes": "16gbit"}, "'16gbit' is no size"),
    ("cluster", {"memory_bytes": 1.5}, "memory_bytes must be an int, got 1.5"),
    ("cluster", {"jitter": "high"}, "jitter must be a number .*got 'high'"),
    ("cluster", {"name": 5}, "name must be a text, got 5"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), ROWS)
def test_what_a_document_cannot_say(kind: str, changes: dict[str, Any], message: str) -> None:
    """Every one is a ValueError that says the key."""
    with pytest.raises(ValueError, match=message):
        type(GOOD[kind]).from_json(edited(kind, changes))
