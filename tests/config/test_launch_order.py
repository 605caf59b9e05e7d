# SPDX-License-Identifier: Apache-2.0
"""In which order the host launches on the GPUs of one process; nothing is run.

CUDA loads a kernel only once the GPU has nothing to do, and MAX launches all GPUs from
one thread. So a rank may wait on its GPU only for launches that are in their queues, or
will be before the thread loads anything.
"""

import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from max.dtype import DType
from max.graph import BufferType, Graph, TensorType

from max_ep.graph import ops as graph_ops
from tests.children import WHERE_WE_IMPORT, ran, slow
from tests.harness import all_round_trip, building, round_trip
from tests.oracle.cases import BY_RANK_CASES, CASES, SUMS_CASES

TWO = {
    "by_expert": CASES["two_ranks"],
    "by_rank": BY_RANK_CASES["two_ranks_by_rank"],
    "sums": SUMS_CASES["top_32_sums"],
    "quantized": BY_RANK_CASES["forwarded_fp8_by_rank"],
}
FORMS = {"together": all_round_trip, "split": round_trip}


def text_of(case, build) -> str:
    config = case.config(target="gpu")
    with building("order", case, config) as (manager, ranks, graph):
        built = build(manager, ranks)
        graph.output(*(value for of_rank in built for value in of_rank))
    return str(graph)


class Order:
    """EP ops of a graph in MAX's text, and what each comes after by its chain."""

    def __init__(self, text: str) -> None:
        self.before: dict[str, list[str]] = {}
        self.launches: list[SimpleNamespace] = []
        for line in text.splitlines():
            if created := re.match(r"\s*(%\d+) = mo.chain.create\((.*?)\)", line):
                self.before[created[1]] = re.findall(r"%\w+(?:#\d+)?", created[2])
            if called := re.match(r'\s*(%\d+)(?::(\d+))? = mo.custom .*"max_ep', line):
                *values, chain = re.findall(
                    r"%\w+(?:#\d+)?", re.search(r"\](\(%.*?\)) :", line)[1]
                )
                n_results = int(called[2] or 1)
                out = f"{called[1]}#{n_results - 1}" if n_results > 1 else called[1]
                self.before[out] = [chain]
                name = re.search(r'symbol = "max_ep\.(\w+)"', line)[1]
                form = re.search(r'op = "(\w+)"', line)
                gpu = re.search(r'device_ref<"(\w+)", (\d)>', line)
                self.launches.append(
                    SimpleNamespace(
                        name=form[1] if form else name,
                        where="".join(gpu.groups()) if gpu else "cpu",
                        values=values,
                        chain=chain,
                        out=out,
                    )
                )

    def all_before(self, chain: str) -> Iterator[str]:
        seen, found = set(), [chain]
        while found:
            if (one := found.pop()) not in seen:
                seen.add(one)
                found += self.before.get(one, [])
        yield from seen

    def named(self, name: str) -> list[SimpleNamespace]:
        return [launch for launch in self.launches if launch.name == name]


@pytest.mark.parametrize("case", TWO)
def test_fused_launches_begin_together(case):
    """No GPU's is launched before the values of all are there."""
    order = Order(text_of(TWO[case], all_round_trip))
    ready = {launch.out: launch for launch in order.named("ready")}
    assert len(ready) == 4  # two phases of two ranks
    for name in ("dispatch", "combine"):
        launches = order.named(name)
        assert {launch.where for launch in launches} == {"gpu0", "gpu1"}
        (last,) = {launch.chain for launch in launches}
        assert last in ready
        awaited = [x for x in order.all_before(last) if x in ready]
        values = {value for x in awaited for value in ready[x].values}
        for launch in launches:
            # Behind counters and order come tokens, ids; or expert rows.
            assert launch.values[3 if name == "dispatch" else 2] in values
    for launch in order.named("combine"):
        dispatched = {x.out for x in order.named("dispatch")}
        assert dispatched < set(order.all_before(launch.chain))


@pytest.mark.parametrize("case", TWO)
def test_what_only_waits_comes_behind_what_it_waits_for(case):
    order = Order(text_of(TWO[case], round_trip))
    for phase in ("dispatch", "combine"):
        sent = {launch.out for launch in order.named(f"{phase}_async")}
        waits = order.named(f"{phase}_wait")
        assert len(sent) == len(waits) == 2
        assert all(sent < set(order.all_before(wait.chain)) for wait in waits)


def test_the_order_is_an_op_of_the_launches_package(monkeypatch):
    """With SHMEM they are of another one; MAX cannot take both into a graph."""
    config = CASES["last_rank_empty"].config(target="gpu", n_nodes=2, n_gpus_per_node=2)
    gpus = [config.device(rank) for rank in range(2)]
    types = [BufferType(DType.int32, [1], gpu) for gpu in gpus]
    types += [TensorType(DType.bfloat16, [3, 8], gpu) for gpu in gpus]
    added = []
    monkeypatch.setattr(
        graph_ops, "add_op", lambda name, *_, **how: added.append((name, how))
    )
    with Graph("two", input_types=types) as graph:
        *counters, x, y = graph.inputs
        counters = [value.buffer for value in counters]
        graph_ops.start_together(config, counters, [x.tensor, y.tensor])
    assert config.uses_shmem and added == [("ready", {"with_shmem": True})] * 2


def test_one_gpu_needs_no_order():
    assert "max_ep.ready" not in text_of(CASES["one_rank"], round_trip)
    assert "max_ep.ready" not in text_of(CASES["one_rank"], all_round_trip)


@slow
@pytest.mark.parametrize("form", FORMS)
def test_max_keeps_the_order(form, tmp_path):
    """MAX's compiler drops an order between ops that share no buffer, and makes one op
    of neighbours on one device."""
    command = sys.executable, "-m", "tests.config.launched", form, tmp_path
    done = ran(*command, timeout=600, PYTHONPATH=WHERE_WE_IMPORT)
    calls = [
        (line[1], line[2], set(re.findall(r"%\w+(?:#\d+)?", line[3])))
        for line in re.finditer(r"(%\d+)\S* = \S+ @__(\w+)_async\((.*?)\)", done.stdout)
    ]
    made = {out: given for out, _, given in calls}
    names = {out: name for out, name, _ in calls}

    def all_before(out: str) -> set[str]:
        near = {x for x in made[out] if x in made}
        return near.union(*map(all_before, near))

    def named(start: str) -> list[str]:
        return [out for out, name in names.items() if name.startswith(start)]

    assert done.returncode == 0 and named("ready"), done.stdout + done.stderr
    if form == "together":
        for phase in ("dispatch", "combine"):
            two = named(phase)
            readies = [{x for x in all_before(y) if x in named("ready")} for y in two]
            assert len(two) == 2 and readies[0] == readies[1] != set()
            assert not any(x in all_before(y) for x in two for y in two)
    else:
        for phase in ("dispatch", "combine"):
            sends, waits = named(phase)[:2], named(phase)[2:]
            assert len(waits) == 2
            assert all(set(sends) <= all_before(wait) for wait in waits)
