# SPDX-License-Identifier: Apache-2.0
"""Three processes with a rank each. One is killed: the others agree on it, and take a
new one in. One is expelled, and rejoins. Those that stay replay one graph."""

import multiprocessing
import os
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection

from max.driver import Accelerator, Buffer, accelerator_count
from max.engine import InferenceSession

from max_ep import EPCommInitializer
from max_ep.limits import GROUP_VARIABLE
from max_ep.memory.setup_graph import setup_model
from tests.gpu.test_gpu_masks import without
from tests.harness import assert_round_trip, building, flatten, round_trip, take_outputs
from tests.oracle.cases import Case
from tests.oracle.drawn import make_inputs
from tests.oracle.oracle import expected

N_RANKS, TIMEOUT_S = 3, 4.0


def member(rank: int, group: str, case: Case, replays: bool, pipe: Connection) -> None:
    """Does what it is asked, and answers."""
    if accelerator_count() >= N_RANKS:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    os.environ[GROUP_VARIABLE] = group  # as `launch` does: they are on one host
    session = InferenceSession(devices=[Accelerator()])
    one_each = dict(n_nodes=N_RANKS, n_gpus_per_node=1, node_id=rank, target="gpu")
    config = case.config(**one_each, timeout_s=TIMEOUT_S, on_timeout="mask")
    one = replace(case, n_ranks=1)
    with building(f"agree_{case.name}", one, config) as (manager, ranks, graph):
        graph.output(*(v for of_rank in round_trip(manager, ranks) for v in of_rank))
    model = session.load(graph)
    comm, setup = EPCommInitializer(config, group), setup_model(session, config)
    replayed = []

    def join(_: None) -> list[int]:
        comm.ep_init(session, setup)
        return comm.active_ranks()

    def run(inputs: list[Buffer]) -> list[Buffer]:
        if not replays:
            return model.execute(*inputs)
        if not replayed:
            outputs = model.execute(*inputs)
            replayed[:] = inputs, model.capture(1, *inputs)
            return outputs
        for to, what in zip(replayed[0], inputs):
            if to is not what and not to.is_host:
                to.inplace_copy_from(what)
        model.replay(1, *replayed[0])
        return replayed[1]

    def mask(other: int) -> list[int]:
        comm.mask(other)
        return comm.active_ranks()

    def step(dead: int | None) -> list[int]:
        given = make_inputs(case, "uniform", counts=[case.max_tokens_per_rank] * 3)
        given = given if dead is None else without(case, given, dead)
        want = expected(case, given).of(slice(rank, rank + 1))
        of_all = flatten(given)
        n = len(of_all) // N_RANKS
        mine = of_all[n * rank : n * rank + n]
        inputs = [x.to(session.devices[0]) for x in mine]
        begin = time.monotonic()
        outputs = run([*inputs, *comm.model_inputs()])
        comm.check()
        assert dead is None or time.monotonic() - begin < TIMEOUT_S + 1
        assert_round_trip(f"rank {rank}", take_outputs(one, iter(outputs)), want)
        return comm.active_ranks()

    calls = dict(join=join, mask=mask, step=step)
    calls |= dict(reconcile=lambda _: comm.reconcile(), rejoin=lambda _: comm.rejoin())
    pipe.send("loaded")
    while (request := pipe.recv()) is not None:
        name, argument = request
        try:
            pipe.send(calls[name](argument))
        except Exception:
            pipe.send(traceback.format_exc())
    comm.close()


def run(case: Case) -> None:
    """One is killed and comes again; another is masked by hand, and rejoins."""
    context = multiprocessing.get_context("spawn")
    group, pipes, processes = f"agree-{os.getpid()}", {}, {}

    def start(rank: int, replays: bool) -> None:
        pipes[rank], theirs = context.Pipe()
        given = rank, group, case, replays, theirs
        processes[rank] = context.Process(target=member, args=given, daemon=True)
        processes[rank].start()

    def ask(ranks: list[int], name: str, argument: object = None) -> list:
        for rank in ranks:
            pipes[rank].send((name, argument))
        return [pipes[rank].recv() for rank in ranks]

    def take_in(rank: int, call: str) -> None:
        """A rank joins while the others run steps; then all do."""
        others = [other for other in everybody if other != rank]
        pipes[rank].send((call, None))
        while (got := ask(others, "reconcile")) == 2 * [others]:
            got = ask(others, "step", rank)
            assert got == 2 * [others], got
        assert [*got, pipes[rank].recv()] == N_RANKS * [everybody], got
        for call in ("step", "reconcile", "step"):
            got = ask(everybody, call)
            assert got == N_RANKS * [everybody], got

    everybody = list(range(N_RANKS))
    try:
        for rank in everybody:
            start(rank, replays=True)
        assert [pipes[rank].recv() for rank in everybody] == N_RANKS * ["loaded"]
        for call in ("join", "step", "reconcile"):
            got = ask(everybody, call)
            assert got == N_RANKS * [everybody], got
        processes[2].kill()
        processes[2].join()
        for call in ("step", "reconcile", "step"):
            got = ask([0, 1], call, 2)
            assert got == 2 * [[0, 1]], got
        start(2, replays=False)
        assert pipes[2].recv() == "loaded"
        take_in(2, "join")
        assert ask([0], "mask", 1) == [[0, 2]]
        *active, expelled = ask([0, 2, 1], "reconcile")
        assert active == 2 * [[0, 2]] and "RankExpelled" in expelled, expelled
        take_in(1, "rejoin")
    finally:
        for process in processes.values():
            process.kill()
            process.join()
