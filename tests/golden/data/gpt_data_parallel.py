"""GPT: data_parallel on 2x2xH100.

Ranks: data = 2 * (rank // 2 % 2) + rank % 2.
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
) -> Tensor:
    # hidden: [4/data·2, 12, 24]
    # norm_1_weight: [24]
    # norm_1_bias: [24]
    # attention_qkv_weight: [72, 24]
    # attention_qkv_bias: [72]
    # attention_out_weight: [24, 24]
    # attention_out_bias: [24]
    # norm_2_weight: [24]
    # norm_2_bias: [24]
    # up_weight: [96, 24]
    # up_bias: [96]
    # down_weight: [24, 96]
    # down_bias: [24]
    # norm_1  (gpt.py:44)
    norm_1 = F.layer_norm(hidden, (24,), norm_1_weight, norm_1_bias, 1e-05)  # [4/data·2, 12, 24]

    # attention.qkv  (gpt.py:23)
    attention_qkv = F.linear(norm_1, attention_qkv_weight, attention_qkv_bias)  # [4/data·2, 12, 72]
    del norm_1

    # attention  (gpt.py:23)
    attention_view = attention_qkv.reshape((2, 12, 3, 6, 4))  # [4/data·2, 12, 3, 6, 4]
    attention_unbind, attention_unbind_2, attention_unbind_3 = attention_view.unbind(2)  # [4/data·2, 12, 6, 4]
    del attention_qkv, attention_view

    # attention  (gpt.py:25)
    attention_transpose = attention_unbind.transpose(1, 2)  # [4/data·2, 6, 12, 4]
    attention_transpose_2 = attention_unbind_2.transpose(1, 2)  # [4/data·2, 6, 12, 4]
    attention_transpose_3 = attention_unbind_3.transpose(1, 2)  # [4/data·2, 6, 12, 4]
    del attention_unbind, attention_unbind_2, attention_unbind_3

    # attention  (gpt.py:26)
    attention_scaled_dot_product_attention = F.scaled_dot_product_attention(attention_transpose, attention_transpose_2, attention_transpose_3, is_causal=True)  # [4/data·2, 6, 12, 4]
    del attention_transpose, attention_transpose_2, attention_transpose_3

    # attention  (gpt.py:27)
    attention_transpose_4 = attention_scaled_dot_product_attention.transpose(1, 2)  # [4/data·2, 12, 6, 4]
    attention_view_2 = attention_transpose_4.reshape((2, 12, 24))  # [4/data·2, 12, 24]
    del attention_scaled_dot_product_attention, attention_transpose_4

    # attention.out  (gpt.py:27)
    attention_out = F.linear(attention_view_2, attention_out_weight, attention_out_bias)  # [4/data·2, 12, 24]
    del attention_view_2

    # (top)  (gpt.py:44)
    add = hidden + attention_out  # [4/data·2, 12, 24]
    del attention_out

    # norm_2  (gpt.py:45)
    norm_2 = F.layer_norm(add, (24,), norm_2_weight, norm_2_bias, 1e-05)  # [4/data·2, 12, 24]

    # up  (gpt.py:45)
    up = F.linear(norm_2, up_weight, up_bias)  # [4/data·2, 12, 96]
    del norm_2

    # (top)  (gpt.py:45)
    gelu = F.gelu(up, approximate='tanh')  # [4/data·2, 12, 96]
    del up

    # down  (gpt.py:46)
    down = F.linear(gelu, down_weight, down_bias)  # [4/data·2, 12, 24]
    del gelu

    # (top)  (gpt.py:46)
    add_2 = add + down  # [4/data·2, 12, 24]
    return add_2


def forward(
    ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
) -> rt.Result:
    # tokens  (gpt.py:70)
    tokens_weight = ctx.weight('tokens.weight')
    input_ids = batch['input_ids']
    tokens = F.embedding(input_ids, tokens_weight)  # [4/data·2, 12, 24]

    # (top)  (gpt.py:71)
    arange = torch.arange(0, 12, 1, dtype=torch.int64, device=ctx.device)  # [12]

    # positions  (gpt.py:71)
    positions_weight = ctx.weight('positions.weight')
    positions = F.embedding(arange, positions_weight)  # [12, 24]
    del arange

    # (top)  (gpt.py:71)
    add = tokens + positions  # [4/data·2, 12, 24]
    del positions, tokens

    # blocks.0
    blocks_0 = ctx.call(block, 'blocks.0', (add,), ('blocks.0.norm_1.weight', 'blocks.0.norm_1.bias', 'blocks.0.attention.qkv.weight', 'blocks.0.attention.qkv.bias', 'blocks.0.attention.out.weight', 'blocks.0.attention.out.bias', 'blocks.0.norm_2.weight', 'blocks.0.norm_2.bias', 'blocks.0.up.weight', 'blocks.0.up.bias', 'blocks.0.down.weight', 'blocks.0.down.bias'))
    del add

    # blocks.1
    blocks_1 = ctx.call(block, 'blocks.1', (blocks_0,), ('blocks.1.norm_1.weight', 'blocks.1.norm_1.bias', 'blocks.1.attention.qkv.weight', 'blocks.1.attention.qkv.bias', 'blocks.1.attention.out.weight', 'blocks.1.attention.out.bias', 'blocks.1.norm_2.weight', 'blocks.1.norm_2.bias', 'blocks.1.up.weight', 'blocks.1.up.bias', 'blocks.1.down.weight', 'blocks.1.down.bias'))
    del blocks_0

    # norm  (gpt.py:74)
    norm_weight = ctx.weight('norm.weight')
    norm_bias = ctx.weight('norm.bias')
    norm = F.layer_norm(blocks_1, (24,), norm_weight, norm_bias, 1e-05)  # [4/data·2, 12, 24]
    del blocks_1

    # head  (gpt.py:74)
    head = F.linear(norm, tokens_weight)  # [4/data·2, 12, 24]
    del norm

    # (top)  (gpt.py:75)
    slice_1 = head.narrow(1, 0, 11)  # [4/data·2, 11, 24]
    view = slice_1.reshape((22, 24))  # [4/data·22, 24]
    labels = batch['labels']
    slice_2 = labels.narrow(1, 1, 11)  # [4/data·2, 11]
    view_2 = slice_2.reshape((22,))  # [4/data·22]
    cross_entropy_loss_ne_0 = view_2 != -100  # [4/data·22]
    cross_entropy_loss_to_copy_1 = cross_entropy_loss_ne_0.to(torch.float32)  # [4/data·22]
    cross_entropy_loss_cross_entropy_loss_2 = F.cross_entropy(view, view_2, reduction='none')  # [4/data·22]
    cross_entropy_loss_sum_3 = torch.sum(cross_entropy_loss_to_copy_1)  # [] partial(data)
    cross_entropy_loss_sum_4 = torch.sum(cross_entropy_loss_cross_entropy_loss_2)  # [] partial(data)
    cross_entropy_loss_sum_3__reduce_data = rt.reduce(cross_entropy_loss_sum_3, ctx, ('data',), backward="identity")  # []
    cross_entropy_loss = cross_entropy_loss_sum_4 / cross_entropy_loss_sum_3__reduce_data  # [] partial(data)
    return rt.Result(loss=cross_entropy_loss, partial=('data',))


MESH = rt.Mesh(
    (
        rt.Axis('data', 4, ((2, 2), (2, 1))),
    )
)

PROGRAM = rt.Program(
    name='GPT',
    mesh=MESH,
    inputs=(
        rt.TensorSpec('input_ids', (8, 12), 'int64', (('data', 2), (12,))),
        rt.TensorSpec('labels', (8, 12), 'int64', (('data', 2), (12,))),
    ),
    parameters=(
        rt.ParameterSpec('tokens.weight', (24, 24), 'float32', ((24,), (24,)), aliases=('head.weight',)),
        rt.ParameterSpec('positions.weight', (12, 24), 'float32', ((12,), (24,))),
        rt.ParameterSpec('blocks.0.norm_1.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_1.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.attention.qkv.weight', (72, 24), 'float32', ((72,), (24,))),
        rt.ParameterSpec('blocks.0.attention.qkv.bias', (72,), 'float32', ((72,),)),
        rt.ParameterSpec('blocks.0.attention.out.weight', (24, 24), 'float32', ((24,), (24,))),
        rt.ParameterSpec('blocks.0.attention.out.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_2.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.norm_2.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.0.up.weight', (96, 24), 'float32', ((96,), (24,))),
        rt.ParameterSpec('blocks.0.up.bias', (96,), 'float32', ((96,),)),
        rt.ParameterSpec('blocks.0.down.weight', (24, 96), 'float32', ((24,), (96,))),
        rt.ParameterSpec('blocks.0.down.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_1.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_1.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.attention.qkv.weight', (72, 24), 'float32', ((72,), (24,))),
        rt.ParameterSpec('blocks.1.attention.qkv.bias', (72,), 'float32', ((72,),)),
        rt.ParameterSpec('blocks.1.attention.out.weight', (24, 24), 'float32', ((24,), (24,))),
        rt.ParameterSpec('blocks.1.attention.out.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_2.weight', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.norm_2.bias', (24,), 'float32', ((24,),)),
        rt.ParameterSpec('blocks.1.up.weight', (96, 24), 'float32', ((96,), (24,))),
        rt.ParameterSpec('blocks.1.up.bias', (96,), 'float32', ((96,),)),
        rt.ParameterSpec('blocks.1.down.weight', (24, 96), 'float32', ((24,), (96,))),
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
        rt.StepNode('STEP', 'gradient_norm', ('data',)),
        rt.StepNode('STEP', 'update', ()),
    ),
    num_microbatches=1,
    actions=('F0', 'B0', 'REDUCE', 'STEP', 'GATHER'),
    groups=(
        ('data',),
    ),
    forward=forward,
)
