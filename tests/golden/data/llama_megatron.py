"""Llama: megatron on 2x2xH100.

Ranks: data = rank // 2 % 2, tensor = rank % 2.
Layouts in comments, per dim: `2/data·4` is a dim of 8, of which `data` owns the outer digit of 2
and 4 are local; a bare number is whole on every rank; `partial(a)` are addends of a sum over `a`.
Moves name what their backward pass does: `rt.replicate` sends nothing forward. `rt.mask(x, ctx,
axes)` is x on the first rank along `axes` and zero on the others: what must enter a sum once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from parloom import runtime as rt


def block(
    ctx: rt.Context, prefix: str, hidden: Tensor, hidden_2: Tensor, hidden_3: Tensor,
    attention_norm_weight: Tensor, attention_q_weight: Tensor, attention_k_weight: Tensor,
    attention_v_weight: Tensor, attention_out_weight: Tensor, mlp_norm_weight: Tensor,
    gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
) -> Tensor:
    # hidden: [2/data·4, 12, 24] partial(tensor)
    # hidden_2: [12, 6]
    # hidden_3: [12, 6]
    # attention_norm_weight: [24]
    # attention_q_weight: [2/tensor·12, 24]
    # attention_k_weight: [2/tensor·6, 24]
    # attention_v_weight: [2/tensor·6, 24]
    # attention_out_weight: [24, 2/tensor·12]
    # mlp_norm_weight: [24]
    # gate_weight: [2/tensor·18, 24]
    # up_weight: [2/tensor·18, 24]
    # down_weight: [24, 2/tensor·18]
    hidden__reduce_tensor = rt.reduce(hidden, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]

    # attention_norm  (llama.py:21)
    attention_norm_pow = torch.pow(hidden__reduce_tensor, 2)  # [2/data·4, 12, 24]
    attention_norm_mean = torch.mean(attention_norm_pow, (-1,), True)  # [2/data·4, 12, 1]
    attention_norm_add = attention_norm_mean + 1e-06  # [2/data·4, 12, 1]
    attention_norm_rsqrt = torch.rsqrt(attention_norm_add)  # [2/data·4, 12, 1]
    attention_norm_mul = hidden__reduce_tensor * attention_norm_rsqrt  # [2/data·4, 12, 24]
    attention_norm = attention_norm_mul * attention_norm_weight  # [2/data·4, 12, 24]
    attention_norm__replicate_tensor = rt.replicate(attention_norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del attention_norm_pow, attention_norm_mean, attention_norm_add, attention_norm_rsqrt, attention_norm_mul, attention_norm

    # attention.q  (llama.py:43)
    attention_q = F.linear(attention_norm__replicate_tensor, attention_q_weight)  # [2/data·4, 12, 2/tensor·12]

    # attention  (llama.py:43)
    attention_view = attention_q.reshape((4, 12, 2, 6))  # [2/data·4, 12, 2/tensor·2, 6]
    attention_transpose = attention_view.transpose(1, 2)  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_q, attention_view

    # attention.k  (llama.py:44)
    attention_k = F.linear(attention_norm__replicate_tensor, attention_k_weight)  # [2/data·4, 12, 2/tensor·6]

    # attention  (llama.py:44)
    attention_view_2 = attention_k.reshape((4, 12, 1, 6))  # [2/data·4, 12, 2/tensor, 6]
    attention_transpose_2 = attention_view_2.transpose(1, 2)  # [2/data·4, 2/tensor, 12, 6]
    del attention_k, attention_view_2

    # attention.v  (llama.py:45)
    attention_v = F.linear(attention_norm__replicate_tensor, attention_v_weight)  # [2/data·4, 12, 2/tensor·6]
    del attention_norm__replicate_tensor

    # attention  (llama.py:45)
    attention_view_3 = attention_v.reshape((4, 12, 1, 6))  # [2/data·4, 12, 2/tensor, 6]
    attention_transpose_3 = attention_view_3.transpose(1, 2)  # [2/data·4, 2/tensor, 12, 6]
    del attention_v, attention_view_3

    # attention  (llama.py:46)
    attention_split, attention_split_2 = attention_transpose.split([3, 3], 3)  # [2/data·4, 2/tensor·2, 12, 3]
    attention_mul = attention_transpose * hidden_2  # [2/data·4, 2/tensor·2, 12, 6]
    attention_neg = torch.neg(attention_split_2)  # [2/data·4, 2/tensor·2, 12, 3]
    attention_cat = torch.cat((attention_neg, attention_split), 3)  # [2/data·4, 2/tensor·2, 12, 6]
    attention_mul_2 = attention_cat * hidden_3  # [2/data·4, 2/tensor·2, 12, 6]
    attention_add = attention_mul + attention_mul_2  # [2/data·4, 2/tensor·2, 12, 6]
    attention_split_3, attention_split_4 = attention_transpose_2.split([3, 3], 3)  # [2/data·4, 2/tensor, 12, 3]
    attention_mul_3 = attention_transpose_2 * hidden_2  # [2/data·4, 2/tensor, 12, 6]
    attention_neg_2 = torch.neg(attention_split_4)  # [2/data·4, 2/tensor, 12, 3]
    attention_cat_2 = torch.cat((attention_neg_2, attention_split_3), 3)  # [2/data·4, 2/tensor, 12, 6]
    attention_mul_4 = attention_cat_2 * hidden_3  # [2/data·4, 2/tensor, 12, 6]
    attention_add_2 = attention_mul_3 + attention_mul_4  # [2/data·4, 2/tensor, 12, 6]
    del attention_transpose, attention_split_2, attention_neg, attention_split, attention_cat, attention_mul, attention_mul_2, attention_transpose_2, attention_split_4, attention_neg_2, attention_split_3, attention_cat_2, attention_mul_3, attention_mul_4

    # attention  (llama.py:47)
    attention_unsqueeze = attention_add_2.unsqueeze(2)  # [2/data·4, 2/tensor, 1, 12, 6]
    attention_expand = attention_unsqueeze.expand((4, 1, 2, 12, 6))  # [2/data·4, 2/tensor, 2, 12, 6]
    attention_view_4 = attention_expand.reshape((4, 2, 12, 6))  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_add_2, attention_unsqueeze, attention_expand

    # attention  (llama.py:48)
    attention_unsqueeze_2 = attention_transpose_3.unsqueeze(2)  # [2/data·4, 2/tensor, 1, 12, 6]
    attention_expand_2 = attention_unsqueeze_2.expand((4, 1, 2, 12, 6))  # [2/data·4, 2/tensor, 2, 12, 6]
    attention_view_5 = attention_expand_2.reshape((4, 2, 12, 6))  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_transpose_3, attention_unsqueeze_2, attention_expand_2

    # attention  (llama.py:49)
    attention_scaled_dot_product_attention = F.scaled_dot_product_attention(attention_add, attention_view_4, attention_view_5, is_causal=True)  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_add, attention_view_4, attention_view_5

    # attention  (llama.py:50)
    attention_transpose_4 = attention_scaled_dot_product_attention.transpose(1, 2)  # [2/data·4, 12, 2/tensor·2, 6]
    attention_view_6 = attention_transpose_4.reshape((4, 12, 12))  # [2/data·4, 12, 2/tensor·12]
    del attention_scaled_dot_product_attention, attention_transpose_4

    # attention.out  (llama.py:50)
    attention_out = F.linear(attention_view_6, attention_out_weight)  # [2/data·4, 12, 24] partial(tensor)
    attention_out__reduce_tensor = rt.reduce(attention_out, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del attention_view_6, attention_out

    # (top)  (llama.py:72)
    add = hidden__reduce_tensor + attention_out__reduce_tensor  # [2/data·4, 12, 24]
    del attention_out__reduce_tensor, hidden__reduce_tensor

    # mlp_norm  (llama.py:21)
    mlp_norm_pow = torch.pow(add, 2)  # [2/data·4, 12, 24]
    mlp_norm_mean = torch.mean(mlp_norm_pow, (-1,), True)  # [2/data·4, 12, 1]
    mlp_norm_add = mlp_norm_mean + 1e-06  # [2/data·4, 12, 1]
    mlp_norm_rsqrt = torch.rsqrt(mlp_norm_add)  # [2/data·4, 12, 1]
    mlp_norm_mul = add * mlp_norm_rsqrt  # [2/data·4, 12, 24]
    mlp_norm = mlp_norm_mul * mlp_norm_weight  # [2/data·4, 12, 24]
    mlp_norm__replicate_tensor = rt.replicate(mlp_norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del mlp_norm_pow, mlp_norm_mean, mlp_norm_add, mlp_norm_rsqrt, mlp_norm_mul, mlp_norm

    # gate  (llama.py:74)
    gate = F.linear(mlp_norm__replicate_tensor, gate_weight)  # [2/data·4, 12, 2/tensor·18]

    # (top)  (llama.py:74)
    silu = F.silu(gate)  # [2/data·4, 12, 2/tensor·18]
    del gate

    # up  (llama.py:74)
    up = F.linear(mlp_norm__replicate_tensor, up_weight)  # [2/data·4, 12, 2/tensor·18]
    del mlp_norm__replicate_tensor

    # (top)  (llama.py:74)
    mul = silu * up  # [2/data·4, 12, 2/tensor·18]
    del silu, up

    # down  (llama.py:74)
    down = F.linear(mul, down_weight)  # [2/data·4, 12, 24] partial(tensor)
    down__reduce_tensor = rt.reduce(down, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del mul, down

    # (top)  (llama.py:74)
    add_2 = add + down__reduce_tensor  # [2/data·4, 12, 24]
    return add_2


def block_2(
    ctx: rt.Context, prefix: str, hidden: Tensor, hidden_2: Tensor, hidden_3: Tensor,
    attention_norm_weight: Tensor, attention_q_weight: Tensor, attention_k_weight: Tensor,
    attention_v_weight: Tensor, attention_out_weight: Tensor, mlp_norm_weight: Tensor,
    gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
) -> Tensor:
    # hidden: [2/data·4, 12, 24]
    # hidden_2: [12, 6]
    # hidden_3: [12, 6]
    # attention_norm_weight: [24]
    # attention_q_weight: [2/tensor·12, 24]
    # attention_k_weight: [2/tensor·6, 24]
    # attention_v_weight: [2/tensor·6, 24]
    # attention_out_weight: [24, 2/tensor·12]
    # mlp_norm_weight: [24]
    # gate_weight: [2/tensor·18, 24]
    # up_weight: [2/tensor·18, 24]
    # down_weight: [24, 2/tensor·18]
    # attention_norm  (llama.py:21)
    attention_norm_pow = torch.pow(hidden, 2)  # [2/data·4, 12, 24]
    attention_norm_mean = torch.mean(attention_norm_pow, (-1,), True)  # [2/data·4, 12, 1]
    attention_norm_add = attention_norm_mean + 1e-06  # [2/data·4, 12, 1]
    attention_norm_rsqrt = torch.rsqrt(attention_norm_add)  # [2/data·4, 12, 1]
    attention_norm_mul = hidden * attention_norm_rsqrt  # [2/data·4, 12, 24]
    attention_norm = attention_norm_mul * attention_norm_weight  # [2/data·4, 12, 24]
    attention_norm__replicate_tensor = rt.replicate(attention_norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del attention_norm_pow, attention_norm_mean, attention_norm_add, attention_norm_rsqrt, attention_norm_mul, attention_norm

    # attention.q  (llama.py:43)
    attention_q = F.linear(attention_norm__replicate_tensor, attention_q_weight)  # [2/data·4, 12, 2/tensor·12]

    # attention  (llama.py:43)
    attention_view = attention_q.reshape((4, 12, 2, 6))  # [2/data·4, 12, 2/tensor·2, 6]
    attention_transpose = attention_view.transpose(1, 2)  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_q, attention_view

    # attention.k  (llama.py:44)
    attention_k = F.linear(attention_norm__replicate_tensor, attention_k_weight)  # [2/data·4, 12, 2/tensor·6]

    # attention  (llama.py:44)
    attention_view_2 = attention_k.reshape((4, 12, 1, 6))  # [2/data·4, 12, 2/tensor, 6]
    attention_transpose_2 = attention_view_2.transpose(1, 2)  # [2/data·4, 2/tensor, 12, 6]
    del attention_k, attention_view_2

    # attention.v  (llama.py:45)
    attention_v = F.linear(attention_norm__replicate_tensor, attention_v_weight)  # [2/data·4, 12, 2/tensor·6]
    del attention_norm__replicate_tensor

    # attention  (llama.py:45)
    attention_view_3 = attention_v.reshape((4, 12, 1, 6))  # [2/data·4, 12, 2/tensor, 6]
    attention_transpose_3 = attention_view_3.transpose(1, 2)  # [2/data·4, 2/tensor, 12, 6]
    del attention_v, attention_view_3

    # attention  (llama.py:46)
    attention_split, attention_split_2 = attention_transpose.split([3, 3], 3)  # [2/data·4, 2/tensor·2, 12, 3]
    attention_mul = attention_transpose * hidden_2  # [2/data·4, 2/tensor·2, 12, 6]
    attention_neg = torch.neg(attention_split_2)  # [2/data·4, 2/tensor·2, 12, 3]
    attention_cat = torch.cat((attention_neg, attention_split), 3)  # [2/data·4, 2/tensor·2, 12, 6]
    attention_mul_2 = attention_cat * hidden_3  # [2/data·4, 2/tensor·2, 12, 6]
    attention_add = attention_mul + attention_mul_2  # [2/data·4, 2/tensor·2, 12, 6]
    attention_split_3, attention_split_4 = attention_transpose_2.split([3, 3], 3)  # [2/data·4, 2/tensor, 12, 3]
    attention_mul_3 = attention_transpose_2 * hidden_2  # [2/data·4, 2/tensor, 12, 6]
    attention_neg_2 = torch.neg(attention_split_4)  # [2/data·4, 2/tensor, 12, 3]
    attention_cat_2 = torch.cat((attention_neg_2, attention_split_3), 3)  # [2/data·4, 2/tensor, 12, 6]
    attention_mul_4 = attention_cat_2 * hidden_3  # [2/data·4, 2/tensor, 12, 6]
    attention_add_2 = attention_mul_3 + attention_mul_4  # [2/data·4, 2/tensor, 12, 6]
    del attention_transpose, attention_split_2, attention_neg, attention_split, attention_cat, attention_mul, attention_mul_2, attention_transpose_2, attention_split_4, attention_neg_2, attention_split_3, attention_cat_2, attention_mul_3, attention_mul_4

    # attention  (llama.py:47)
    attention_unsqueeze = attention_add_2.unsqueeze(2)  # [2/data·4, 2/tensor, 1, 12, 6]
    attention_expand = attention_unsqueeze.expand((4, 1, 2, 12, 6))  # [2/data·4, 2/tensor, 2, 12, 6]
    attention_view_4 = attention_expand.reshape((4, 2, 12, 6))  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_add_2, attention_unsqueeze, attention_expand

    # attention  (llama.py:48)
    attention_unsqueeze_2 = attention_transpose_3.unsqueeze(2)  # [2/data·4, 2/tensor, 1, 12, 6]
    attention_expand_2 = attention_unsqueeze_2.expand((4, 1, 2, 12, 6))  # [2/data·4, 2/tensor, 2, 12, 6]
    attention_view_5 = attention_expand_2.reshape((4, 2, 12, 6))  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_transpose_3, attention_unsqueeze_2, attention_expand_2

    # attention  (llama.py:49)
    attention_scaled_dot_product_attention = F.scaled_dot_product_attention(attention_add, attention_view_4, attention_view_5, is_causal=True)  # [2/data·4, 2/tensor·2, 12, 6]
    del attention_add, attention_view_4, attention_view_5

    # attention  (llama.py:50)
    attention_transpose_4 = attention_scaled_dot_product_attention.transpose(1, 2)  # [2/data·4, 12, 2/tensor·2, 6]
    attention_view_6 = attention_transpose_4.reshape((4, 12, 12))  # [2/data·4, 12, 2/tensor·12]
    del attention_scaled_dot_product_attention, attention_transpose_4

    # attention.out  (llama.py:50)
    attention_out = F.linear(attention_view_6, attention_out_weight)  # [2/data·4, 12, 24] partial(tensor)
    attention_out__reduce_tensor = rt.reduce(attention_out, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del attention_view_6, attention_out

    # (top)  (llama.py:72)
    add = hidden + attention_out__reduce_tensor  # [2/data·4, 12, 24]
    del attention_out__reduce_tensor

    # mlp_norm  (llama.py:21)
    mlp_norm_pow = torch.pow(add, 2)  # [2/data·4, 12, 24]
    mlp_norm_mean = torch.mean(mlp_norm_pow, (-1,), True)  # [2/data·4, 12, 1]
    mlp_norm_add = mlp_norm_mean + 1e-06  # [2/data·4, 12, 1]
    mlp_norm_rsqrt = torch.rsqrt(mlp_norm_add)  # [2/data·4, 12, 1]
    mlp_norm_mul = add * mlp_norm_rsqrt  # [2/data·4, 12, 24]
    mlp_norm = mlp_norm_mul * mlp_norm_weight  # [2/data·4, 12, 24]
    mlp_norm__replicate_tensor = rt.replicate(mlp_norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del mlp_norm_pow, mlp_norm_mean, mlp_norm_add, mlp_norm_rsqrt, mlp_norm_mul, mlp_norm

    # gate  (llama.py:74)
    gate = F.linear(mlp_norm__replicate_tensor, gate_weight)  # [2/data·4, 12, 2/tensor·18]

    # (top)  (llama.py:74)
    silu = F.silu(gate)  # [2/data·4, 12, 2/tensor·18]
    del gate

    # up  (llama.py:74)
    up = F.linear(mlp_norm__replicate_tensor, up_weight)  # [2/data·4, 12, 2/tensor·18]
    del mlp_norm__replicate_tensor

    # (top)  (llama.py:74)
    mul = silu * up  # [2/data·4, 12, 2/tensor·18]
    del silu, up

    # down  (llama.py:74)
    down = F.linear(mul, down_weight)  # [2/data·4, 12, 24] partial(tensor)
    down__reduce_tensor = rt.reduce(down, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del mul, down

    # (top)  (llama.py:74)
    add_2 = add + down__reduce_tensor  # [2/data·4, 12, 24]
    return add_2


def forward(
    ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
) -> rt.Result:
    # tokens  (llama.py:99)
    tokens_weight = ctx.weight('tokens.weight')
    input_ids = batch['input_ids']
    tokens = rt.embedding(tokens_weight, input_ids, ctx, ('tensor', 12), padding=-1)  # [2/data·4, 12, 24] partial(tensor)

    # (top)  (llama.py:100)
    arange = torch.arange(0, 12, 1, dtype=torch.float32, device=ctx.device)  # [12]

    # (top)  (llama.py:101)
    unsqueeze = arange.unsqueeze(1)  # [12, 1]
    frequencies = ctx.buffer('frequencies')
    mul = unsqueeze * frequencies  # [12, 3]
    del arange, unsqueeze

    # (top)  (llama.py:102)
    cat = torch.cat((mul, mul), 1)  # [12, 6]
    del mul

    # (top)  (llama.py:103)
    cos = torch.cos(cat)  # [12, 6]
    sin = torch.sin(cat)  # [12, 6]
    del cat

    # blocks.0
    blocks_0 = ctx.call(block, 'blocks.0', (tokens, cos, sin), ('blocks.0.attention_norm.weight', 'blocks.0.attention.q.weight', 'blocks.0.attention.k.weight', 'blocks.0.attention.v.weight', 'blocks.0.attention.out.weight', 'blocks.0.mlp_norm.weight', 'blocks.0.gate.weight', 'blocks.0.up.weight', 'blocks.0.down.weight'))
    del tokens

    # blocks.1
    blocks_1 = ctx.call(block_2, 'blocks.1', (blocks_0, cos, sin), ('blocks.1.attention_norm.weight', 'blocks.1.attention.q.weight', 'blocks.1.attention.k.weight', 'blocks.1.attention.v.weight', 'blocks.1.attention.out.weight', 'blocks.1.mlp_norm.weight', 'blocks.1.gate.weight', 'blocks.1.up.weight', 'blocks.1.down.weight'))
    del blocks_0, cos, sin

    # norm  (llama.py:21)
    norm_pow = torch.pow(blocks_1, 2)  # [2/data·4, 12, 24]
    norm_mean = torch.mean(norm_pow, (-1,), True)  # [2/data·4, 12, 1]
    norm_add = norm_mean + 1e-06  # [2/data·4, 12, 1]
    norm_rsqrt = torch.rsqrt(norm_add)  # [2/data·4, 12, 1]
    norm_mul = blocks_1 * norm_rsqrt  # [2/data·4, 12, 24]
    norm_weight = ctx.weight('norm.weight')
    norm = norm_mul * norm_weight  # [2/data·4, 12, 24]
    norm__replicate_tensor = rt.replicate(norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del norm_pow, norm_mean, norm_add, blocks_1, norm_rsqrt, norm_mul, norm

    # head  (llama.py:106)
    head_weight = ctx.weight('head.weight')
    head = F.linear(norm__replicate_tensor, head_weight)  # [2/data·4, 12, 2/tensor·12]
    del norm__replicate_tensor

    # (top)  (llama.py:107)
    slice_1 = head.narrow(1, 0, 11)  # [2/data·4, 11, 2/tensor·12]
    view = slice_1.reshape((44, 12))  # [2/data·44, 2/tensor·12]
    labels = batch['labels']
    slice_2 = labels.narrow(1, 1, 11)  # [2/data·4, 11]
    view_2 = slice_2.reshape((44,))  # [2/data·44]
    cross_entropy_loss_ne_0 = view_2 != -100  # [2/data·44]
    cross_entropy_loss_to_copy_1 = cross_entropy_loss_ne_0.to(torch.float32)  # [2/data·44]
    cross_entropy_loss_detach_2 = view.detach()  # [2/data·44, 2/tensor·12]
    cross_entropy_loss_parloom_amax_3 = torch.amax(cross_entropy_loss_detach_2, (1,), True)  # [2/data·44, 1] partial(tensor, max)
    cross_entropy_loss_parloom_amax_3__reduce_tensor = rt.reduce(cross_entropy_loss_parloom_amax_3, ctx, ('tensor',), op='max', backward="identity")  # [2/data·44, 1]
    cross_entropy_loss_sub_4 = view - cross_entropy_loss_parloom_amax_3__reduce_tensor  # [2/data·44, 2/tensor·12]
    cross_entropy_loss_exp_5 = torch.exp(cross_entropy_loss_sub_4)  # [2/data·44, 2/tensor·12]
    cross_entropy_loss_sum_6 = torch.sum(cross_entropy_loss_exp_5, (1,), True)  # [2/data·44, 1] partial(tensor)
    cross_entropy_loss_sum_6__reduce_tensor = rt.reduce(cross_entropy_loss_sum_6, ctx, ('tensor',), backward="identity")  # [2/data·44, 1]
    cross_entropy_loss_view_7 = cross_entropy_loss_sum_6__reduce_tensor.reshape((44,))  # [2/data·44]
    cross_entropy_loss_log_8 = torch.log(cross_entropy_loss_view_7)  # [2/data·44]
    cross_entropy_loss_parloom_pick_9 = rt.pick(cross_entropy_loss_sub_4, view_2, ctx, ('tensor', 12))  # [2/data·44] partial(tensor)
    cross_entropy_loss_parloom_pick_9__reduce_tensor = rt.reduce(cross_entropy_loss_parloom_pick_9, ctx, ('tensor',), backward="identity")  # [2/data·44]
    cross_entropy_loss_sub_10 = cross_entropy_loss_log_8 - cross_entropy_loss_parloom_pick_9__reduce_tensor  # [2/data·44]
    cross_entropy_loss_eq_11 = view_2 == -100  # [2/data·44]
    cross_entropy_loss_masked_fill_12 = cross_entropy_loss_sub_10.masked_fill(cross_entropy_loss_eq_11, 0.0)  # [2/data·44]
    cross_entropy_loss_sum_13 = torch.sum(cross_entropy_loss_to_copy_1)  # [] partial(data)
    cross_entropy_loss_sum_14 = torch.sum(cross_entropy_loss_masked_fill_12)  # [] partial(data)
    cross_entropy_loss_sum_13__reduce_data = rt.reduce(cross_entropy_loss_sum_13, ctx, ('data',), backward="identity")  # []
    cross_entropy_loss = cross_entropy_loss_sum_14 / cross_entropy_loss_sum_13__reduce_data  # [] partial(data)
    return rt.Result(loss=cross_entropy_loss, partial=('data',))


MESH = rt.Mesh(
    (
        rt.Axis('data', 2, ((2, 2),)),
        rt.Axis('tensor', 2, ((2, 1),)),
    )
)

PROGRAM = rt.Program(
    name='Llama',
    mesh=MESH,
    inputs=(
        rt.TensorSpec('input_ids', (8, 12), 'int64', (('data', 4), (12,))),
        rt.TensorSpec('labels', (8, 12), 'int64', (('data', 4), (12,))),
    ),
    buffers=(
        rt.TensorSpec('frequencies', (3,), 'float32', ((3,),)),
    ),
    parameters=(
        rt.ParameterSpec('tokens.weight', (24, 24), 'float32', (('tensor', 12), (24,))),
        rt.ParameterSpec('blocks.0.attention_norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.attention.q.weight', (24, 24), 'float32', (('tensor', 12), (24,))),
        rt.ParameterSpec('blocks.0.attention.k.weight', (12, 24), 'float32', (('tensor', 6), (24,))),
        rt.ParameterSpec('blocks.0.attention.v.weight', (12, 24), 'float32', (('tensor', 6), (24,))),
        rt.ParameterSpec('blocks.0.attention.out.weight', (24, 24), 'float32', ((24,), ('tensor', 12))),
        rt.ParameterSpec('blocks.0.mlp_norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.gate.weight', (36, 24), 'float32', (('tensor', 18), (24,))),
        rt.ParameterSpec('blocks.0.up.weight', (36, 24), 'float32', (('tensor', 18), (24,))),
        rt.ParameterSpec('blocks.0.down.weight', (24, 36), 'float32', ((24,), ('tensor', 18))),
        rt.ParameterSpec('blocks.1.attention_norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.attention.q.weight', (24, 24), 'float32', (('tensor', 12), (24,))),
        rt.ParameterSpec('blocks.1.attention.k.weight', (12, 24), 'float32', (('tensor', 6), (24,))),
        rt.ParameterSpec('blocks.1.attention.v.weight', (12, 24), 'float32', (('tensor', 6), (24,))),
        rt.ParameterSpec('blocks.1.attention.out.weight', (24, 24), 'float32', ((24,), ('tensor', 12))),
        rt.ParameterSpec('blocks.1.mlp_norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.gate.weight', (36, 24), 'float32', (('tensor', 18), (24,))),
        rt.ParameterSpec('blocks.1.up.weight', (36, 24), 'float32', (('tensor', 18), (24,))),
        rt.ParameterSpec('blocks.1.down.weight', (24, 36), 'float32', ((24,), ('tensor', 18))),
        rt.ParameterSpec('norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('head.weight', (24, 24), 'float32', (('tensor', 12), (24,))),
    ),
    step=(
        rt.StepNode('REDUCE', 'all_reduce', ('data',), bucket_bytes=1048576, parameters=(
            'tokens.weight', 'blocks.0.attention_norm.weight', 'blocks.0.attention.q.weight',
            'blocks.0.attention.k.weight', 'blocks.0.attention.v.weight',
            'blocks.0.attention.out.weight', 'blocks.0.mlp_norm.weight', 'blocks.0.gate.weight',
            'blocks.0.up.weight', 'blocks.0.down.weight', 'blocks.1.attention_norm.weight',
            'blocks.1.attention.q.weight', 'blocks.1.attention.k.weight',
            'blocks.1.attention.v.weight', 'blocks.1.attention.out.weight',
            'blocks.1.mlp_norm.weight', 'blocks.1.gate.weight', 'blocks.1.up.weight',
            'blocks.1.down.weight', 'norm.weight', 'head.weight',
        )),
        rt.StepNode('STEP', 'gradient_norm', ('data', 'tensor')),
        rt.StepNode('STEP', 'update', ()),
    ),
    num_microbatches=1,
    actions=('F0', 'B0', 'REDUCE', 'STEP', 'GATHER'),
    groups=(
        ('data',),
        ('tensor',),
    ),
    forward=forward,
)
