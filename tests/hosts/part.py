# SPDX-License-Identifier: Apache-2.0
"""The ranks of a case's group that one process has."""

from dataclasses import dataclass, fields

from tests.oracle.cases import Case


@dataclass(frozen=True)
class Part(Case):
    """Some ranks of a group, with the rows that all ranks may send to one, and with the
    experts that a rank has."""

    shape: tuple[int, ...] = ()
    n_held: int = 0

    @staticmethod
    def of(case: Case, n_ranks: int) -> "Part":
        given = {f.name: getattr(case, f.name) for f in fields(case)}
        of_group = dict(shape=tuple(case.rows_shape), n_held=case.n_local_experts)
        return Part(**given | dict(n_ranks=n_ranks) | of_group)

    @property
    def rows_shape(self) -> list[int]:
        return list(self.shape)

    @property
    def n_local_experts(self) -> int:
        return self.n_held
