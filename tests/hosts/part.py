# SPDX-License-Identifier: Apache-2.0
"""The ranks of a case's group that one process has."""

from dataclasses import dataclass, fields

from tests.oracle.cases import Case


@dataclass(frozen=True)
class Part(Case):
    """Some ranks of a group, with the rows that all ranks may send to one."""

    shape: tuple[int, ...] = ()

    @staticmethod
    def of(case: Case, n_ranks: int) -> "Part":
        given = {f.name: getattr(case, f.name) for f in fields(case)}
        return Part(**given | dict(n_ranks=n_ranks), shape=tuple(case.rows_shape))

    @property
    def rows_shape(self) -> list[int]:
        return list(self.shape)
