"""GPT: megatron on 2x2xH100.

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
    ctx: rt.Context, prefix: str, hidden: Tensor, norm_1_weight: Tensor, norm_1_bias: Tensor,
    attention_qkv_weight: Tensor, attention_qkv_bias: Tensor, attention_out_weight: Tensor,
    attention_out_bias: Tensor, norm_2_weight: Tensor, norm_2_bias: Tensor, up_weight: Tensor,
    up_bias: Tensor, down_weight: Tensor, down_bias: Tensor,
) -> rt.Made:
    # hidden: [2/data·4, 12, 24]
    # norm_1_weight: [24]
    # norm_1_bias: [24]
    # attention_qkv_weight: [3·2/tensor·12, 24]
    # attention_qkv_bias: [3·2/tensor·12]
    # attention_out_weight: [24, 2/tensor·12]
    # attention_out_bias: [24]
    # norm_2_weight: [24]
    # norm_2_bias: [24]
    # up_weight: [2/tensor·48, 24]
    # up_bias: [2/tensor·48]
    # down_weight: [24, 2/tensor·48]
    # down_bias: [24]
    # norm_1  (gpt.py:44)
    norm_1 = F.layer_norm(hidden, (24,), norm_1_weight, norm_1_bias, 1e-05)  # [2/data·4, 12, 24]
    norm_1__replicate_tensor = rt.replicate(norm_1, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del norm_1

    # attention.qkv  (gpt.py:23)
    attention_qkv = F.linear(norm_1__replicate_tensor, attention_qkv_weight, attention_qkv_bias)  # [2/data·4, 12, 3·2/tensor·12]
    del norm_1__replicate_tensor

    # attention  (gpt.py:23)
    attention_view = attention_qkv.reshape((4, 12, 3, 3, 4))  # [2/data·4, 12, 3, 2/tensor·3, 4]
    attention_unbind, attention_unbind_2, attention_unbind_3 = attention_view.unbind(2)  # [2/data·4, 12, 2/tensor·3, 4]
    del attention_qkv, attention_view

    # attention  (gpt.py:25)
    attention_transpose = attention_unbind.transpose(1, 2)  # [2/data·4, 2/tensor·3, 12, 4]
    attention_transpose_2 = attention_unbind_2.transpose(1, 2)  # [2/data·4, 2/tensor·3, 12, 4]
    attention_transpose_3 = attention_unbind_3.transpose(1, 2)  # [2/data·4, 2/tensor·3, 12, 4]
    del attention_unbind, attention_unbind_2, attention_unbind_3

    # attention  (gpt.py:26)
    with ctx.again(0):
        attention_scaled_dot_product_attention = F.scaled_dot_product_attention(attention_transpose, attention_transpose_2, attention_transpose_3, is_causal=True)  # [2/data·4, 2/tensor·3, 12, 4]

        # attention  (gpt.py:27)
        attention_transpose_4 = attention_scaled_dot_product_attention.transpose(1, 2)  # [2/data·4, 12, 2/tensor·3, 4]
        attention_view_2 = attention_transpose_4.reshape((4, 12, 12))  # [2/data·4, 12, 2/tensor·12]
    del attention_transpose_4

    # attention.out  (gpt.py:27)
    attention_out = F.linear(attention_view_2, attention_out_weight, rt.mask(attention_out_bias, ctx, ('tensor',)))  # [2/data·4, 12, 24] partial(tensor)
    attention_out__reduce_tensor = rt.reduce(attention_out, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del attention_out

    # (top)  (gpt.py:44)
    add = hidden + attention_out__reduce_tensor  # [2/data·4, 12, 24]
    del attention_out__reduce_tensor

    # norm_2  (gpt.py:45)
    norm_2 = F.layer_norm(add, (24,), norm_2_weight, norm_2_bias, 1e-05)  # [2/data·4, 12, 24]
    norm_2__replicate_tensor = rt.replicate(norm_2, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del norm_2

    # up  (gpt.py:45)
    up = F.linear(norm_2__replicate_tensor, up_weight, up_bias)  # [2/data·4, 12, 2/tensor·48]
    del norm_2__replicate_tensor

    # (top)  (gpt.py:45)
    with ctx.again(1):
        gelu = F.gelu(up, approximate='tanh')  # [2/data·4, 12, 2/tensor·48]

    # down  (gpt.py:46)
    down = F.linear(gelu, down_weight, rt.mask(down_bias, ctx, ('tensor',)))  # [2/data·4, 12, 24] partial(tensor)
    down__reduce_tensor = rt.reduce(down, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    del down

    # (top)  (gpt.py:46)
    add_2 = add + down__reduce_tensor  # [2/data·4, 12, 24]
    return rt.Made(add_2, kept=(attention_transpose, attention_transpose_2, attention_transpose_3, up), dropped=(attention_scaled_dot_product_attention, attention_view_2, gelu))


def block_again(
    ctx: rt.Context, prefix: str, attention_transpose: Tensor, attention_transpose_2: Tensor,
    attention_transpose_3: Tensor, up: Tensor, norm_1_weight: Tensor, norm_1_bias: Tensor,
    attention_qkv_weight: Tensor, attention_qkv_bias: Tensor, attention_out_weight: Tensor,
    attention_out_bias: Tensor, norm_2_weight: Tensor, norm_2_bias: Tensor, up_weight: Tensor,
    up_bias: Tensor, down_weight: Tensor, down_bias: Tensor,
) -> tuple[Tensor, ...]:
    # attention  (gpt.py:26)
    with ctx.again(0):
        attention_scaled_dot_product_attention = F.scaled_dot_product_attention(attention_transpose, attention_transpose_2, attention_transpose_3, is_causal=True)  # [2/data·4, 2/tensor·3, 12, 4]

        # attention  (gpt.py:27)
        attention_transpose_4 = attention_scaled_dot_product_attention.transpose(1, 2)  # [2/data·4, 12, 2/tensor·3, 4]
        attention_view_2 = attention_transpose_4.reshape((4, 12, 12))  # [2/data·4, 12, 2/tensor·12]
    del attention_transpose_4

    # (top)  (gpt.py:45)
    with ctx.again(1):
        gelu = F.gelu(up, approximate='tanh')  # [2/data·4, 12, 2/tensor·48]
    return (attention_scaled_dot_product_attention, attention_view_2, gelu)


def forward(
    ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
) -> rt.Result:
    # tokens  (gpt.py:70)
    tokens_weight = ctx.weight('tokens.weight')
    input_ids = batch['input_ids']
    tokens = rt.embedding(tokens_weight, input_ids, ctx, ('tensor', 12), padding=-1)  # [2/data·4, 12, 24] partial(tensor)

    # (top)  (gpt.py:71)
    arange = torch.arange(0, 12, 1, dtype=torch.int64, device=ctx.device)  # [12]

    # positions  (gpt.py:71)
    positions_weight = ctx.weight('positions.weight')
    positions = rt.embedding(positions_weight, arange, ctx, ('tensor', 6), padding=-1)  # [12, 24] partial(tensor)
    tokens__reduce_tensor = rt.reduce(tokens, ctx, ('tensor',), backward="identity")  # [2/data·4, 12, 24]
    positions__reduce_tensor = rt.reduce(positions, ctx, ('tensor',), backward="identity")  # [12, 24]
    del arange, tokens, positions

    # (top)  (gpt.py:71)
    add = tokens__reduce_tensor + positions__reduce_tensor  # [2/data·4, 12, 24]
    del positions__reduce_tensor, tokens__reduce_tensor

    # blocks.0
    blocks_0 = ctx.call(block, 'blocks.0', (add,), ('blocks.0.norm_1.weight', 'blocks.0.norm_1.bias', 'blocks.0.attention.qkv.weight', 'blocks.0.attention.qkv.bias', 'blocks.0.attention.out.weight', 'blocks.0.attention.out.bias', 'blocks.0.norm_2.weight', 'blocks.0.norm_2.bias', 'blocks.0.up.weight', 'blocks.0.up.bias', 'blocks.0.down.weight', 'blocks.0.down.bias'), again=block_again)
    del add

    # blocks.1
    blocks_1 = ctx.call(block, 'blocks.1', (blocks_0,), ('blocks.1.norm_1.weight', 'blocks.1.norm_1.bias', 'blocks.1.attention.qkv.weight', 'blocks.1.attention.qkv.bias', 'blocks.1.attention.out.weight', 'blocks.1.attention.out.bias', 'blocks.1.norm_2.weight', 'blocks.1.norm_2.bias', 'blocks.1.up.weight', 'blocks.1.up.bias', 'blocks.1.down.weight', 'blocks.1.down.bias'), again=block_again)
    del blocks_0

    # norm  (gpt.py:74)
    norm_weight = ctx.weight('norm.weight')
    norm_bias = ctx.weight('norm.bias')
    norm = F.layer_norm(blocks_1, (24,), norm_weight, norm_bias, 1e-05)  # [2/data·4, 12, 24]
    norm__replicate_tensor = rt.replicate(norm, ctx, ('tensor',), backward="all_reduce")  # [2/data·4, 12, 24]
    del blocks_1, norm

    # head  (gpt.py:74)
    head = F.linear(norm__replicate_tensor, tokens_weight)  # [2/data·4, 12, 2/tensor·12]
    del norm__replicate_tensor

    # (top)  (gpt.py:75)
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
    name='GPT',
    mesh=MESH,
    inputs=(
        rt.TensorSpec('input_ids', (8, 12), 'int64', (('data', 4), (12,))),
        rt.TensorSpec('labels', (8, 12), 'int64', (('data', 4), (12,))),
    ),
    parameters=(
        rt.ParameterSpec('tokens.weight', (24, 24), 'float32', (('tensor', 12), (24,)), aliases=('head.weight',)),
        rt.ParameterSpec('positions.weight', (12, 24), 'float32', (('tensor', 6), (24,))),
        rt.ParameterSpec('blocks.0.norm_1.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_1.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.attention.qkv.weight', (72, 24), 'float32', ((3, 'tensor', 12), (24,))),
        rt.ParameterSpec('blocks.0.attention.qkv.bias', (72,), 'float32', ((3, 'tensor', 12),)),
        rt.ParameterSpec('blocks.0.attention.out.weight', (24, 24), 'float32', ((24,), ('tensor', 12))),
        rt.ParameterSpec('blocks.0.attention.out.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_2.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_2.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.up.weight', (96, 24), 'float32', (('tensor', 48), (24,))),
        rt.ParameterSpec('blocks.0.up.bias', (96,), 'float32', (('tensor', 48),)),
        rt.ParameterSpec('blocks.0.down.weight', (24, 96), 'float32', ((24,), ('tensor', 48))),
        rt.ParameterSpec('blocks.0.down.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_1.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_1.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.attention.qkv.weight', (72, 24), 'float32', ((3, 'tensor', 12), (24,))),
        rt.ParameterSpec('blocks.1.attention.qkv.bias', (72,), 'float32', ((3, 'tensor', 12),)),
        rt.ParameterSpec('blocks.1.attention.out.weight', (24, 24), 'float32', ((24,), ('tensor', 12))),
        rt.ParameterSpec('blocks.1.attention.out.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_2.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_2.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.up.weight', (96, 24), 'float32', (('tensor', 48), (24,))),
        rt.ParameterSpec('blocks.1.up.bias', (96,), 'float32', (('tensor', 48),)),
        rt.ParameterSpec('blocks.1.down.weight', (24, 96), 'float32', ((24,), ('tensor', 48))),
        rt.ParameterSpec('blocks.1.down.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('norm.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('norm.bias', (24,), 'float32', ((24,),)),
    ),
    step=(
        rt.StepNode('REDUCE', 'all_reduce', ('data',), bucket_bytes=1048576, parameters=(
            'tokens.weight', 'positions.weight', 'blocks.0.norm_1.weight', 'blocks.0.norm_1.bias',
            'blocks.0.attention.qkv.weight', 'blocks.0.attention.qkv.bias',
            'blocks.0.attention.out.weight', 'blocks.0.attention.out.bias',
            'blocks.0.norm_2.weight', 'blocks.0.norm_2.bias', 'blocks.0.up.weight',
            'blocks.0.up.bias', 'blocks.0.down.weight', 'blocks.0.down.bias',
            'blocks.1.norm_1.weight', 'blocks.1.norm_1.bias', 'blocks.1.attention.qkv.weight',
            'blocks.1.attention.qkv.bias', 'blocks.1.attention.out.weight',
            'blocks.1.attention.out.bias', 'blocks.1.norm_2.weight', 'blocks.1.norm_2.bias',
            'blocks.1.up.weight', 'blocks.1.up.bias', 'blocks.1.down.weight', 'blocks.1.down.bias',
            'norm.weight', 'norm.bias',
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
