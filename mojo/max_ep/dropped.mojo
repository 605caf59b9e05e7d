# SPDX-License-Identifier: Apache-2.0
"""What a rank lacks because rows did not fit (`kept_rows.mojo`): CPU ranks only."""
from layout import TileTensor
from max.gpu.host.info import is_cpu

from .arguments import Call, check_shape, check_size, imm, mut_
from .layout import Group


def launch_dropped[
    group: Group, //, target: StaticString
](
    call: Call[group],
    of_tokens: TileTensor[DType.int32, ...],
    of_experts: TileTensor[DType.int32, ...],
    topk_ids: TileTensor[DType.int32, ...],
) raises:
    """Counts, of each token, its choices without a row in the last combine, and of each
    local expert, the rows that the last dispatch dropped."""
    comptime assert is_cpu[target](), "max_ep: only CPU ranks drop rows"
    var n_tokens = Int(of_tokens.dim[0]())
    call.check_n_tokens[target](n_tokens)
    check_shape(call.op, "topk_ids", topk_ids, n_tokens, group.top_k)
    check_size(call.op, "experts", Int(of_experts.dim[0]()), group.n_local_experts())
    var ids = imm(topk_ids)
    for token_idx in range(n_tokens):
        var n_missing = -call.counters.rows_found(group, token_idx)[]
        for k in range(group.top_k):
            n_missing += Int32(ids[unsafe_offset=group.choice(token_idx, k)] >= 0)
        mut_(of_tokens)[unsafe_offset=token_idx] = n_missing
    for i in range(group.n_local_experts()):
        mut_(of_experts)[unsafe_offset=i] = call.counters.rows_dropped(group, i)[]
