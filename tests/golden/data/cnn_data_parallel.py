"""CNN: data_parallel on 2x2xH100.

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
    ctx: rt.Context, prefix: str, hidden: Tensor, norm_1_num_batches_tracked: Tensor,
    norm_1_running_mean: Tensor, norm_1_running_var: Tensor, norm_2_num_batches_tracked: Tensor,
    norm_2_running_mean: Tensor, norm_2_running_var: Tensor, conv_1_weight: Tensor,
    norm_1_weight: Tensor, norm_1_bias: Tensor, conv_2_weight: Tensor, norm_2_weight: Tensor,
    norm_2_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    # hidden: [4/data·2, 6, 6, 6]
    # norm_1_num_batches_tracked: []
    # norm_1_running_mean: [6]
    # norm_1_running_var: [6]
    # norm_2_num_batches_tracked: []
    # norm_2_running_mean: [6]
    # norm_2_running_var: [6]
    # conv_1_weight: [6, 6, 3, 3]
    # norm_1_weight: [6]
    # norm_1_bias: [6]
    # conv_2_weight: [6, 6, 3, 3]
    # norm_2_weight: [6]
    # norm_2_bias: [6]
    # conv_1  (cnn.py:21)
    conv_1 = F.conv2d(hidden, conv_1_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 6, 6, 6]

    # norm_1  (cnn.py:21)
    norm_1_add = norm_1_num_batches_tracked + 1  # []
    norm_1_mean_0 = conv_1.sum((0, 2, 3), keepdim=True) / 288  # [1, 6, 1, 1] partial(data)
    norm_1_mean_0__reduce_data = rt.reduce(norm_1_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_1_sub_1 = conv_1 - norm_1_mean_0__reduce_data  # [4/data·2, 6, 6, 6]
    norm_1_mul_2 = norm_1_sub_1 * norm_1_sub_1  # [4/data·2, 6, 6, 6]
    norm_1_mean_3 = norm_1_mul_2.sum((0, 2, 3), keepdim=True) / 288  # [1, 6, 1, 1] partial(data)
    norm_1_mean_3__reduce_data = rt.reduce(norm_1_mean_3, ctx, ('data',), backward="identity")  # [1, 6, 1, 1]
    norm_1_add_4 = norm_1_mean_3__reduce_data + 1e-05  # [1, 6, 1, 1]
    norm_1_rsqrt_5 = torch.rsqrt(norm_1_add_4)  # [1, 6, 1, 1]
    norm_1_rsqrt_5__replicate_data = rt.replicate(norm_1_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_1_mul_6 = norm_1_sub_1 * norm_1_rsqrt_5__replicate_data  # [4/data·2, 6, 6, 6]
    norm_1_view_7 = norm_1_weight.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_1_view_8 = norm_1_bias.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_1_mul_9 = norm_1_mul_6 * norm_1_view_7  # [4/data·2, 6, 6, 6]
    norm_1 = norm_1_mul_9 + norm_1_view_8  # [4/data·2, 6, 6, 6]
    norm_1_detach_11 = norm_1_mean_0__reduce_data.detach()  # [1, 6, 1, 1]
    norm_1_view_12 = norm_1_detach_11.reshape((6,))  # [6]
    norm_1_mul_13 = norm_1_running_mean * 0.9  # [6]
    norm_1_mul_14 = norm_1_view_12 * 0.1  # [6]
    norm_1_new_running_mean = norm_1_mul_13 + norm_1_mul_14  # [6]
    norm_1_detach_16 = norm_1_mean_3__reduce_data.detach()  # [1, 6, 1, 1]
    norm_1_view_17 = norm_1_detach_16.reshape((6,))  # [6]
    norm_1_mul_18 = norm_1_running_var * 0.9  # [6]
    norm_1_mul_19 = norm_1_view_17 * 0.10034843205574913  # [6]
    norm_1_new_running_var = norm_1_mul_18 + norm_1_mul_19  # [6]
    del norm_1_mean_0, conv_1, norm_1_mul_2, norm_1_mean_3, norm_1_add_4, norm_1_rsqrt_5, norm_1_rsqrt_5__replicate_data, norm_1_sub_1, norm_1_mul_6, norm_1_view_7, norm_1_mul_9, norm_1_view_8, norm_1_mean_0__reduce_data, norm_1_detach_11, norm_1_view_12, norm_1_mul_13, norm_1_mul_14, norm_1_mean_3__reduce_data, norm_1_detach_16, norm_1_view_17, norm_1_mul_18, norm_1_mul_19

    # (top)  (cnn.py:21)
    relu = F.relu(norm_1)  # [4/data·2, 6, 6, 6]
    del norm_1

    # conv_2  (cnn.py:22)
    conv_2 = F.conv2d(relu, conv_2_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 6, 6, 6]
    del relu

    # norm_2  (cnn.py:22)
    norm_2_add = norm_2_num_batches_tracked + 1  # []
    norm_2_mean_0 = conv_2.sum((0, 2, 3), keepdim=True) / 288  # [1, 6, 1, 1] partial(data)
    norm_2_mean_0__reduce_data = rt.reduce(norm_2_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_2_sub_1 = conv_2 - norm_2_mean_0__reduce_data  # [4/data·2, 6, 6, 6]
    norm_2_mul_2 = norm_2_sub_1 * norm_2_sub_1  # [4/data·2, 6, 6, 6]
    norm_2_mean_3 = norm_2_mul_2.sum((0, 2, 3), keepdim=True) / 288  # [1, 6, 1, 1] partial(data)
    norm_2_mean_3__reduce_data = rt.reduce(norm_2_mean_3, ctx, ('data',), backward="identity")  # [1, 6, 1, 1]
    norm_2_add_4 = norm_2_mean_3__reduce_data + 1e-05  # [1, 6, 1, 1]
    norm_2_rsqrt_5 = torch.rsqrt(norm_2_add_4)  # [1, 6, 1, 1]
    norm_2_rsqrt_5__replicate_data = rt.replicate(norm_2_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_2_mul_6 = norm_2_sub_1 * norm_2_rsqrt_5__replicate_data  # [4/data·2, 6, 6, 6]
    norm_2_view_7 = norm_2_weight.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_2_view_8 = norm_2_bias.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_2_mul_9 = norm_2_mul_6 * norm_2_view_7  # [4/data·2, 6, 6, 6]
    norm_2 = norm_2_mul_9 + norm_2_view_8  # [4/data·2, 6, 6, 6]
    norm_2_detach_11 = norm_2_mean_0__reduce_data.detach()  # [1, 6, 1, 1]
    norm_2_view_12 = norm_2_detach_11.reshape((6,))  # [6]
    norm_2_mul_13 = norm_2_running_mean * 0.9  # [6]
    norm_2_mul_14 = norm_2_view_12 * 0.1  # [6]
    norm_2_new_running_mean = norm_2_mul_13 + norm_2_mul_14  # [6]
    norm_2_detach_16 = norm_2_mean_3__reduce_data.detach()  # [1, 6, 1, 1]
    norm_2_view_17 = norm_2_detach_16.reshape((6,))  # [6]
    norm_2_mul_18 = norm_2_running_var * 0.9  # [6]
    norm_2_mul_19 = norm_2_view_17 * 0.10034843205574913  # [6]
    norm_2_new_running_var = norm_2_mul_18 + norm_2_mul_19  # [6]
    del norm_2_mean_0, conv_2, norm_2_mul_2, norm_2_mean_3, norm_2_add_4, norm_2_rsqrt_5, norm_2_rsqrt_5__replicate_data, norm_2_sub_1, norm_2_mul_6, norm_2_view_7, norm_2_mul_9, norm_2_view_8, norm_2_mean_0__reduce_data, norm_2_detach_11, norm_2_view_12, norm_2_mul_13, norm_2_mul_14, norm_2_mean_3__reduce_data, norm_2_detach_16, norm_2_view_17, norm_2_mul_18, norm_2_mul_19

    # (top)  (cnn.py:22)
    add = norm_2 + hidden  # [4/data·2, 6, 6, 6]
    relu_2 = F.relu(add)  # [4/data·2, 6, 6, 6]
    return norm_1_add, norm_1_new_running_mean, norm_1_new_running_var, norm_2_add, norm_2_new_running_mean, norm_2_new_running_var, relu_2


def forward(
    ctx: rt.Context, batch: dict[str, Tensor], hoisted: tuple[Tensor, ...]
) -> rt.Result:
    # stem  (cnn.py:43)
    image = batch['image']
    stem_weight = ctx.weight('stem.weight')
    stem = F.conv2d(image, stem_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 6, 12, 12]

    # norm  (cnn.py:43)
    norm_num_batches_tracked = ctx.buffer('norm.num_batches_tracked')
    norm_add = norm_num_batches_tracked + 1  # []
    norm_mean_0 = stem.sum((0, 2, 3), keepdim=True) / 1152  # [1, 6, 1, 1] partial(data)
    norm_mean_0__reduce_data = rt.reduce(norm_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_sub_1 = stem - norm_mean_0__reduce_data  # [4/data·2, 6, 12, 12]
    norm_mul_2 = norm_sub_1 * norm_sub_1  # [4/data·2, 6, 12, 12]
    norm_mean_3 = norm_mul_2.sum((0, 2, 3), keepdim=True) / 1152  # [1, 6, 1, 1] partial(data)
    norm_mean_3__reduce_data = rt.reduce(norm_mean_3, ctx, ('data',), backward="identity")  # [1, 6, 1, 1]
    norm_add_4 = norm_mean_3__reduce_data + 1e-05  # [1, 6, 1, 1]
    norm_rsqrt_5 = torch.rsqrt(norm_add_4)  # [1, 6, 1, 1]
    norm_rsqrt_5__replicate_data = rt.replicate(norm_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 6, 1, 1]
    norm_mul_6 = norm_sub_1 * norm_rsqrt_5__replicate_data  # [4/data·2, 6, 12, 12]
    norm_weight = ctx.weight('norm.weight')
    norm_view_7 = norm_weight.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_bias = ctx.weight('norm.bias')
    norm_view_8 = norm_bias.reshape((1, 6, 1, 1))  # [1, 6, 1, 1]
    norm_mul_9 = norm_mul_6 * norm_view_7  # [4/data·2, 6, 12, 12]
    norm = norm_mul_9 + norm_view_8  # [4/data·2, 6, 12, 12]
    norm_detach_11 = norm_mean_0__reduce_data.detach()  # [1, 6, 1, 1]
    norm_view_12 = norm_detach_11.reshape((6,))  # [6]
    norm_running_mean = ctx.buffer('norm.running_mean')
    norm_mul_13 = norm_running_mean * 0.9  # [6]
    norm_mul_14 = norm_view_12 * 0.1  # [6]
    norm_new_running_mean = norm_mul_13 + norm_mul_14  # [6]
    norm_detach_16 = norm_mean_3__reduce_data.detach()  # [1, 6, 1, 1]
    norm_view_17 = norm_detach_16.reshape((6,))  # [6]
    norm_running_var = ctx.buffer('norm.running_var')
    norm_mul_18 = norm_running_var * 0.9  # [6]
    norm_mul_19 = norm_view_17 * 0.10008688097306691  # [6]
    norm_new_running_var = norm_mul_18 + norm_mul_19  # [6]
    del norm_mean_0, stem, norm_mul_2, norm_mean_3, norm_add_4, norm_rsqrt_5, norm_rsqrt_5__replicate_data, norm_sub_1, norm_mul_6, norm_view_7, norm_mul_9, norm_view_8, norm_mean_0__reduce_data, norm_detach_11, norm_view_12, norm_mul_13, norm_mul_14, norm_mean_3__reduce_data, norm_detach_16, norm_view_17, norm_mul_18, norm_mul_19

    # (top)  (cnn.py:43)
    relu = F.relu(norm)  # [4/data·2, 6, 12, 12]
    del norm

    # pool  (cnn.py:43)
    pool = F.max_pool2d(relu, (2, 2), (2, 2), (0, 0))  # [4/data·2, 6, 6, 6]
    del relu

    # blocks.0
    blocks_0_norm_1_num_batches_tracked = ctx.buffer('blocks.0.norm_1.num_batches_tracked')
    blocks_0_norm_1_running_mean = ctx.buffer('blocks.0.norm_1.running_mean')
    blocks_0_norm_1_running_var = ctx.buffer('blocks.0.norm_1.running_var')
    blocks_0_norm_2_num_batches_tracked = ctx.buffer('blocks.0.norm_2.num_batches_tracked')
    blocks_0_norm_2_running_mean = ctx.buffer('blocks.0.norm_2.running_mean')
    blocks_0_norm_2_running_var = ctx.buffer('blocks.0.norm_2.running_var')
    blocks_0_out, blocks_0_out_2, blocks_0_out_3, blocks_0_out_4, blocks_0_out_5, blocks_0_out_6, blocks_0_out_7 = ctx.call(block, 'blocks.0', (pool, blocks_0_norm_1_num_batches_tracked, blocks_0_norm_1_running_mean, blocks_0_norm_1_running_var, blocks_0_norm_2_num_batches_tracked, blocks_0_norm_2_running_mean, blocks_0_norm_2_running_var), ('blocks.0.conv_1.weight', 'blocks.0.norm_1.weight', 'blocks.0.norm_1.bias', 'blocks.0.conv_2.weight', 'blocks.0.norm_2.weight', 'blocks.0.norm_2.bias'))
    del pool

    # blocks.1
    blocks_1_norm_1_num_batches_tracked = ctx.buffer('blocks.1.norm_1.num_batches_tracked')
    blocks_1_norm_1_running_mean = ctx.buffer('blocks.1.norm_1.running_mean')
    blocks_1_norm_1_running_var = ctx.buffer('blocks.1.norm_1.running_var')
    blocks_1_norm_2_num_batches_tracked = ctx.buffer('blocks.1.norm_2.num_batches_tracked')
    blocks_1_norm_2_running_mean = ctx.buffer('blocks.1.norm_2.running_mean')
    blocks_1_norm_2_running_var = ctx.buffer('blocks.1.norm_2.running_var')
    blocks_1_out, blocks_1_out_2, blocks_1_out_3, blocks_1_out_4, blocks_1_out_5, blocks_1_out_6, blocks_1_out_7 = ctx.call(block, 'blocks.1', (blocks_0_out_7, blocks_1_norm_1_num_batches_tracked, blocks_1_norm_1_running_mean, blocks_1_norm_1_running_var, blocks_1_norm_2_num_batches_tracked, blocks_1_norm_2_running_mean, blocks_1_norm_2_running_var), ('blocks.1.conv_1.weight', 'blocks.1.norm_1.weight', 'blocks.1.norm_1.bias', 'blocks.1.conv_2.weight', 'blocks.1.norm_2.weight', 'blocks.1.norm_2.bias'))
    del blocks_0_out_7

    # blocks.2.conv_1  (cnn.py:21)
    blocks_2_conv_1_weight = ctx.weight('blocks.2.conv_1.weight')
    blocks_2_conv_1 = F.conv2d(blocks_1_out_7, blocks_2_conv_1_weight, None, stride=(2, 2), padding=(1, 1))  # [4/data·2, 12, 3, 3]

    # blocks.2.norm_1  (cnn.py:21)
    blocks_2_norm_1_num_batches_tracked = ctx.buffer('blocks.2.norm_1.num_batches_tracked')
    blocks_2_norm_1_add = blocks_2_norm_1_num_batches_tracked + 1  # []
    blocks_2_norm_1_mean_0 = blocks_2_conv_1.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_2_norm_1_mean_0__reduce_data = rt.reduce(blocks_2_norm_1_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_2_norm_1_sub_1 = blocks_2_conv_1 - blocks_2_norm_1_mean_0__reduce_data  # [4/data·2, 12, 3, 3]
    blocks_2_norm_1_mul_2 = blocks_2_norm_1_sub_1 * blocks_2_norm_1_sub_1  # [4/data·2, 12, 3, 3]
    blocks_2_norm_1_mean_3 = blocks_2_norm_1_mul_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_2_norm_1_mean_3__reduce_data = rt.reduce(blocks_2_norm_1_mean_3, ctx, ('data',), backward="identity")  # [1, 12, 1, 1]
    blocks_2_norm_1_add_4 = blocks_2_norm_1_mean_3__reduce_data + 1e-05  # [1, 12, 1, 1]
    blocks_2_norm_1_rsqrt_5 = torch.rsqrt(blocks_2_norm_1_add_4)  # [1, 12, 1, 1]
    blocks_2_norm_1_rsqrt_5__replicate_data = rt.replicate(blocks_2_norm_1_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_2_norm_1_mul_6 = blocks_2_norm_1_sub_1 * blocks_2_norm_1_rsqrt_5__replicate_data  # [4/data·2, 12, 3, 3]
    blocks_2_norm_1_weight = ctx.weight('blocks.2.norm_1.weight')
    blocks_2_norm_1_view_7 = blocks_2_norm_1_weight.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_2_norm_1_bias = ctx.weight('blocks.2.norm_1.bias')
    blocks_2_norm_1_view_8 = blocks_2_norm_1_bias.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_2_norm_1_mul_9 = blocks_2_norm_1_mul_6 * blocks_2_norm_1_view_7  # [4/data·2, 12, 3, 3]
    blocks_2_norm_1 = blocks_2_norm_1_mul_9 + blocks_2_norm_1_view_8  # [4/data·2, 12, 3, 3]
    blocks_2_norm_1_detach_11 = blocks_2_norm_1_mean_0__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_2_norm_1_view_12 = blocks_2_norm_1_detach_11.reshape((12,))  # [12]
    blocks_2_norm_1_running_mean = ctx.buffer('blocks.2.norm_1.running_mean')
    blocks_2_norm_1_mul_13 = blocks_2_norm_1_running_mean * 0.9  # [12]
    blocks_2_norm_1_mul_14 = blocks_2_norm_1_view_12 * 0.1  # [12]
    blocks_2_norm_1_new_running_mean = blocks_2_norm_1_mul_13 + blocks_2_norm_1_mul_14  # [12]
    blocks_2_norm_1_detach_16 = blocks_2_norm_1_mean_3__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_2_norm_1_view_17 = blocks_2_norm_1_detach_16.reshape((12,))  # [12]
    blocks_2_norm_1_running_var = ctx.buffer('blocks.2.norm_1.running_var')
    blocks_2_norm_1_mul_18 = blocks_2_norm_1_running_var * 0.9  # [12]
    blocks_2_norm_1_mul_19 = blocks_2_norm_1_view_17 * 0.10140845070422536  # [12]
    blocks_2_norm_1_new_running_var = blocks_2_norm_1_mul_18 + blocks_2_norm_1_mul_19  # [12]
    del blocks_2_norm_1_mean_0, blocks_2_conv_1, blocks_2_norm_1_mul_2, blocks_2_norm_1_mean_3, blocks_2_norm_1_add_4, blocks_2_norm_1_rsqrt_5, blocks_2_norm_1_rsqrt_5__replicate_data, blocks_2_norm_1_sub_1, blocks_2_norm_1_mul_6, blocks_2_norm_1_view_7, blocks_2_norm_1_mul_9, blocks_2_norm_1_view_8, blocks_2_norm_1_mean_0__reduce_data, blocks_2_norm_1_detach_11, blocks_2_norm_1_view_12, blocks_2_norm_1_mul_13, blocks_2_norm_1_mul_14, blocks_2_norm_1_mean_3__reduce_data, blocks_2_norm_1_detach_16, blocks_2_norm_1_view_17, blocks_2_norm_1_mul_18, blocks_2_norm_1_mul_19

    # blocks.2  (cnn.py:21)
    blocks_2_relu = F.relu(blocks_2_norm_1)  # [4/data·2, 12, 3, 3]
    del blocks_2_norm_1

    # blocks.2.conv_2  (cnn.py:22)
    blocks_2_conv_2_weight = ctx.weight('blocks.2.conv_2.weight')
    blocks_2_conv_2 = F.conv2d(blocks_2_relu, blocks_2_conv_2_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 12, 3, 3]
    del blocks_2_relu

    # blocks.2.norm_2  (cnn.py:22)
    blocks_2_norm_2_num_batches_tracked = ctx.buffer('blocks.2.norm_2.num_batches_tracked')
    blocks_2_norm_2_add = blocks_2_norm_2_num_batches_tracked + 1  # []
    blocks_2_norm_2_mean_0 = blocks_2_conv_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_2_norm_2_mean_0__reduce_data = rt.reduce(blocks_2_norm_2_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_2_norm_2_sub_1 = blocks_2_conv_2 - blocks_2_norm_2_mean_0__reduce_data  # [4/data·2, 12, 3, 3]
    blocks_2_norm_2_mul_2 = blocks_2_norm_2_sub_1 * blocks_2_norm_2_sub_1  # [4/data·2, 12, 3, 3]
    blocks_2_norm_2_mean_3 = blocks_2_norm_2_mul_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_2_norm_2_mean_3__reduce_data = rt.reduce(blocks_2_norm_2_mean_3, ctx, ('data',), backward="identity")  # [1, 12, 1, 1]
    blocks_2_norm_2_add_4 = blocks_2_norm_2_mean_3__reduce_data + 1e-05  # [1, 12, 1, 1]
    blocks_2_norm_2_rsqrt_5 = torch.rsqrt(blocks_2_norm_2_add_4)  # [1, 12, 1, 1]
    blocks_2_norm_2_rsqrt_5__replicate_data = rt.replicate(blocks_2_norm_2_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_2_norm_2_mul_6 = blocks_2_norm_2_sub_1 * blocks_2_norm_2_rsqrt_5__replicate_data  # [4/data·2, 12, 3, 3]
    blocks_2_norm_2_weight = ctx.weight('blocks.2.norm_2.weight')
    blocks_2_norm_2_view_7 = blocks_2_norm_2_weight.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_2_norm_2_bias = ctx.weight('blocks.2.norm_2.bias')
    blocks_2_norm_2_view_8 = blocks_2_norm_2_bias.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_2_norm_2_mul_9 = blocks_2_norm_2_mul_6 * blocks_2_norm_2_view_7  # [4/data·2, 12, 3, 3]
    blocks_2_norm_2 = blocks_2_norm_2_mul_9 + blocks_2_norm_2_view_8  # [4/data·2, 12, 3, 3]
    blocks_2_norm_2_detach_11 = blocks_2_norm_2_mean_0__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_2_norm_2_view_12 = blocks_2_norm_2_detach_11.reshape((12,))  # [12]
    blocks_2_norm_2_running_mean = ctx.buffer('blocks.2.norm_2.running_mean')
    blocks_2_norm_2_mul_13 = blocks_2_norm_2_running_mean * 0.9  # [12]
    blocks_2_norm_2_mul_14 = blocks_2_norm_2_view_12 * 0.1  # [12]
    blocks_2_norm_2_new_running_mean = blocks_2_norm_2_mul_13 + blocks_2_norm_2_mul_14  # [12]
    blocks_2_norm_2_detach_16 = blocks_2_norm_2_mean_3__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_2_norm_2_view_17 = blocks_2_norm_2_detach_16.reshape((12,))  # [12]
    blocks_2_norm_2_running_var = ctx.buffer('blocks.2.norm_2.running_var')
    blocks_2_norm_2_mul_18 = blocks_2_norm_2_running_var * 0.9  # [12]
    blocks_2_norm_2_mul_19 = blocks_2_norm_2_view_17 * 0.10140845070422536  # [12]
    blocks_2_norm_2_new_running_var = blocks_2_norm_2_mul_18 + blocks_2_norm_2_mul_19  # [12]
    del blocks_2_norm_2_mean_0, blocks_2_conv_2, blocks_2_norm_2_mul_2, blocks_2_norm_2_mean_3, blocks_2_norm_2_add_4, blocks_2_norm_2_rsqrt_5, blocks_2_norm_2_rsqrt_5__replicate_data, blocks_2_norm_2_sub_1, blocks_2_norm_2_mul_6, blocks_2_norm_2_view_7, blocks_2_norm_2_mul_9, blocks_2_norm_2_view_8, blocks_2_norm_2_mean_0__reduce_data, blocks_2_norm_2_detach_11, blocks_2_norm_2_view_12, blocks_2_norm_2_mul_13, blocks_2_norm_2_mul_14, blocks_2_norm_2_mean_3__reduce_data, blocks_2_norm_2_detach_16, blocks_2_norm_2_view_17, blocks_2_norm_2_mul_18, blocks_2_norm_2_mul_19

    # blocks.2.skip  (cnn.py:22)
    blocks_2_skip_weight = ctx.weight('blocks.2.skip.weight')
    blocks_2_skip = F.conv2d(blocks_1_out_7, blocks_2_skip_weight, None, stride=(2, 2), padding=(0, 0))  # [4/data·2, 12, 3, 3]
    del blocks_1_out_7

    # blocks.2  (cnn.py:22)
    blocks_2_add = blocks_2_norm_2 + blocks_2_skip  # [4/data·2, 12, 3, 3]
    blocks_2_relu_2 = F.relu(blocks_2_add)  # [4/data·2, 12, 3, 3]
    del blocks_2_norm_2, blocks_2_skip, blocks_2_add

    # blocks.3.conv_1  (cnn.py:21)
    blocks_3_conv_1_weight = ctx.weight('blocks.3.conv_1.weight')
    blocks_3_conv_1 = F.conv2d(blocks_2_relu_2, blocks_3_conv_1_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 12, 3, 3]

    # blocks.3.norm_1  (cnn.py:21)
    blocks_3_norm_1_num_batches_tracked = ctx.buffer('blocks.3.norm_1.num_batches_tracked')
    blocks_3_norm_1_add = blocks_3_norm_1_num_batches_tracked + 1  # []
    blocks_3_norm_1_mean_0 = blocks_3_conv_1.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_3_norm_1_mean_0__reduce_data = rt.reduce(blocks_3_norm_1_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_3_norm_1_sub_1 = blocks_3_conv_1 - blocks_3_norm_1_mean_0__reduce_data  # [4/data·2, 12, 3, 3]
    blocks_3_norm_1_mul_2 = blocks_3_norm_1_sub_1 * blocks_3_norm_1_sub_1  # [4/data·2, 12, 3, 3]
    blocks_3_norm_1_mean_3 = blocks_3_norm_1_mul_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_3_norm_1_mean_3__reduce_data = rt.reduce(blocks_3_norm_1_mean_3, ctx, ('data',), backward="identity")  # [1, 12, 1, 1]
    blocks_3_norm_1_add_4 = blocks_3_norm_1_mean_3__reduce_data + 1e-05  # [1, 12, 1, 1]
    blocks_3_norm_1_rsqrt_5 = torch.rsqrt(blocks_3_norm_1_add_4)  # [1, 12, 1, 1]
    blocks_3_norm_1_rsqrt_5__replicate_data = rt.replicate(blocks_3_norm_1_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_3_norm_1_mul_6 = blocks_3_norm_1_sub_1 * blocks_3_norm_1_rsqrt_5__replicate_data  # [4/data·2, 12, 3, 3]
    blocks_3_norm_1_weight = ctx.weight('blocks.3.norm_1.weight')
    blocks_3_norm_1_view_7 = blocks_3_norm_1_weight.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_3_norm_1_bias = ctx.weight('blocks.3.norm_1.bias')
    blocks_3_norm_1_view_8 = blocks_3_norm_1_bias.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_3_norm_1_mul_9 = blocks_3_norm_1_mul_6 * blocks_3_norm_1_view_7  # [4/data·2, 12, 3, 3]
    blocks_3_norm_1 = blocks_3_norm_1_mul_9 + blocks_3_norm_1_view_8  # [4/data·2, 12, 3, 3]
    blocks_3_norm_1_detach_11 = blocks_3_norm_1_mean_0__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_3_norm_1_view_12 = blocks_3_norm_1_detach_11.reshape((12,))  # [12]
    blocks_3_norm_1_running_mean = ctx.buffer('blocks.3.norm_1.running_mean')
    blocks_3_norm_1_mul_13 = blocks_3_norm_1_running_mean * 0.9  # [12]
    blocks_3_norm_1_mul_14 = blocks_3_norm_1_view_12 * 0.1  # [12]
    blocks_3_norm_1_new_running_mean = blocks_3_norm_1_mul_13 + blocks_3_norm_1_mul_14  # [12]
    blocks_3_norm_1_detach_16 = blocks_3_norm_1_mean_3__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_3_norm_1_view_17 = blocks_3_norm_1_detach_16.reshape((12,))  # [12]
    blocks_3_norm_1_running_var = ctx.buffer('blocks.3.norm_1.running_var')
    blocks_3_norm_1_mul_18 = blocks_3_norm_1_running_var * 0.9  # [12]
    blocks_3_norm_1_mul_19 = blocks_3_norm_1_view_17 * 0.10140845070422536  # [12]
    blocks_3_norm_1_new_running_var = blocks_3_norm_1_mul_18 + blocks_3_norm_1_mul_19  # [12]
    del blocks_3_norm_1_mean_0, blocks_3_conv_1, blocks_3_norm_1_mul_2, blocks_3_norm_1_mean_3, blocks_3_norm_1_add_4, blocks_3_norm_1_rsqrt_5, blocks_3_norm_1_rsqrt_5__replicate_data, blocks_3_norm_1_sub_1, blocks_3_norm_1_mul_6, blocks_3_norm_1_view_7, blocks_3_norm_1_mul_9, blocks_3_norm_1_view_8, blocks_3_norm_1_mean_0__reduce_data, blocks_3_norm_1_detach_11, blocks_3_norm_1_view_12, blocks_3_norm_1_mul_13, blocks_3_norm_1_mul_14, blocks_3_norm_1_mean_3__reduce_data, blocks_3_norm_1_detach_16, blocks_3_norm_1_view_17, blocks_3_norm_1_mul_18, blocks_3_norm_1_mul_19

    # blocks.3  (cnn.py:21)
    blocks_3_relu = F.relu(blocks_3_norm_1)  # [4/data·2, 12, 3, 3]
    del blocks_3_norm_1

    # blocks.3.conv_2  (cnn.py:22)
    blocks_3_conv_2_weight = ctx.weight('blocks.3.conv_2.weight')
    blocks_3_conv_2 = F.conv2d(blocks_3_relu, blocks_3_conv_2_weight, None, stride=(1, 1), padding=(1, 1))  # [4/data·2, 12, 3, 3]
    del blocks_3_relu

    # blocks.3.norm_2  (cnn.py:22)
    blocks_3_norm_2_num_batches_tracked = ctx.buffer('blocks.3.norm_2.num_batches_tracked')
    blocks_3_norm_2_add = blocks_3_norm_2_num_batches_tracked + 1  # []
    blocks_3_norm_2_mean_0 = blocks_3_conv_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_3_norm_2_mean_0__reduce_data = rt.reduce(blocks_3_norm_2_mean_0, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_3_norm_2_sub_1 = blocks_3_conv_2 - blocks_3_norm_2_mean_0__reduce_data  # [4/data·2, 12, 3, 3]
    blocks_3_norm_2_mul_2 = blocks_3_norm_2_sub_1 * blocks_3_norm_2_sub_1  # [4/data·2, 12, 3, 3]
    blocks_3_norm_2_mean_3 = blocks_3_norm_2_mul_2.sum((0, 2, 3), keepdim=True) / 72  # [1, 12, 1, 1] partial(data)
    blocks_3_norm_2_mean_3__reduce_data = rt.reduce(blocks_3_norm_2_mean_3, ctx, ('data',), backward="identity")  # [1, 12, 1, 1]
    blocks_3_norm_2_add_4 = blocks_3_norm_2_mean_3__reduce_data + 1e-05  # [1, 12, 1, 1]
    blocks_3_norm_2_rsqrt_5 = torch.rsqrt(blocks_3_norm_2_add_4)  # [1, 12, 1, 1]
    blocks_3_norm_2_rsqrt_5__replicate_data = rt.replicate(blocks_3_norm_2_rsqrt_5, ctx, ('data',), backward="all_reduce")  # [1, 12, 1, 1]
    blocks_3_norm_2_mul_6 = blocks_3_norm_2_sub_1 * blocks_3_norm_2_rsqrt_5__replicate_data  # [4/data·2, 12, 3, 3]
    blocks_3_norm_2_weight = ctx.weight('blocks.3.norm_2.weight')
    blocks_3_norm_2_view_7 = blocks_3_norm_2_weight.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_3_norm_2_bias = ctx.weight('blocks.3.norm_2.bias')
    blocks_3_norm_2_view_8 = blocks_3_norm_2_bias.reshape((1, 12, 1, 1))  # [1, 12, 1, 1]
    blocks_3_norm_2_mul_9 = blocks_3_norm_2_mul_6 * blocks_3_norm_2_view_7  # [4/data·2, 12, 3, 3]
    blocks_3_norm_2 = blocks_3_norm_2_mul_9 + blocks_3_norm_2_view_8  # [4/data·2, 12, 3, 3]
    blocks_3_norm_2_detach_11 = blocks_3_norm_2_mean_0__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_3_norm_2_view_12 = blocks_3_norm_2_detach_11.reshape((12,))  # [12]
    blocks_3_norm_2_running_mean = ctx.buffer('blocks.3.norm_2.running_mean')
    blocks_3_norm_2_mul_13 = blocks_3_norm_2_running_mean * 0.9  # [12]
    blocks_3_norm_2_mul_14 = blocks_3_norm_2_view_12 * 0.1  # [12]
    blocks_3_norm_2_new_running_mean = blocks_3_norm_2_mul_13 + blocks_3_norm_2_mul_14  # [12]
    blocks_3_norm_2_detach_16 = blocks_3_norm_2_mean_3__reduce_data.detach()  # [1, 12, 1, 1]
    blocks_3_norm_2_view_17 = blocks_3_norm_2_detach_16.reshape((12,))  # [12]
    blocks_3_norm_2_running_var = ctx.buffer('blocks.3.norm_2.running_var')
    blocks_3_norm_2_mul_18 = blocks_3_norm_2_running_var * 0.9  # [12]
    blocks_3_norm_2_mul_19 = blocks_3_norm_2_view_17 * 0.10140845070422536  # [12]
    blocks_3_norm_2_new_running_var = blocks_3_norm_2_mul_18 + blocks_3_norm_2_mul_19  # [12]
    del blocks_3_norm_2_mean_0, blocks_3_conv_2, blocks_3_norm_2_mul_2, blocks_3_norm_2_mean_3, blocks_3_norm_2_add_4, blocks_3_norm_2_rsqrt_5, blocks_3_norm_2_rsqrt_5__replicate_data, blocks_3_norm_2_sub_1, blocks_3_norm_2_mul_6, blocks_3_norm_2_view_7, blocks_3_norm_2_mul_9, blocks_3_norm_2_view_8, blocks_3_norm_2_mean_0__reduce_data, blocks_3_norm_2_detach_11, blocks_3_norm_2_view_12, blocks_3_norm_2_mul_13, blocks_3_norm_2_mul_14, blocks_3_norm_2_mean_3__reduce_data, blocks_3_norm_2_detach_16, blocks_3_norm_2_view_17, blocks_3_norm_2_mul_18, blocks_3_norm_2_mul_19

    # blocks.3  (cnn.py:22)
    blocks_3_add = blocks_3_norm_2 + blocks_2_relu_2  # [4/data·2, 12, 3, 3]
    blocks_3_relu_2 = F.relu(blocks_3_add)  # [4/data·2, 12, 3, 3]
    del blocks_2_relu_2, blocks_3_norm_2, blocks_3_add

    # average  (cnn.py:46)
    average = F.adaptive_avg_pool2d(blocks_3_relu_2, (1, 1))  # [4/data·2, 12, 1, 1]
    del blocks_3_relu_2

    # (top)  (cnn.py:46)
    view = average.reshape((2, 12))  # [4/data·2, 12]
    del average

    # head  (cnn.py:46)
    head_weight = ctx.weight('head.weight')
    head_bias = ctx.weight('head.bias')
    head = F.linear(view, head_weight, head_bias)  # [4/data·2, 12]
    del view

    # (top)  (cnn.py:47)
    labels = batch['labels']
    cross_entropy_loss_ne_0 = labels != -100  # [4/data·2]
    cross_entropy_loss_to_copy_1 = cross_entropy_loss_ne_0.to(torch.float32)  # [4/data·2]
    cross_entropy_loss_cross_entropy_loss_2 = F.cross_entropy(head, labels, reduction='none')  # [4/data·2]
    cross_entropy_loss_sum_3 = torch.sum(cross_entropy_loss_to_copy_1)  # [] partial(data)
    cross_entropy_loss_sum_4 = torch.sum(cross_entropy_loss_cross_entropy_loss_2)  # [] partial(data)
    cross_entropy_loss_sum_3__reduce_data = rt.reduce(cross_entropy_loss_sum_3, ctx, ('data',), backward="identity")  # []
    cross_entropy_loss = cross_entropy_loss_sum_4 / cross_entropy_loss_sum_3__reduce_data  # [] partial(data)
    return rt.Result(loss=cross_entropy_loss, partial=('data',), updates={'blocks.0.norm_1.num_batches_tracked': blocks_0_out, 'blocks.0.norm_1.running_mean': blocks_0_out_2, 'blocks.0.norm_1.running_var': blocks_0_out_3, 'blocks.0.norm_2.num_batches_tracked': blocks_0_out_4, 'blocks.0.norm_2.running_mean': blocks_0_out_5, 'blocks.0.norm_2.running_var': blocks_0_out_6, 'blocks.1.norm_1.num_batches_tracked': blocks_1_out, 'blocks.1.norm_1.running_mean': blocks_1_out_2, 'blocks.1.norm_1.running_var': blocks_1_out_3, 'blocks.1.norm_2.num_batches_tracked': blocks_1_out_4, 'blocks.1.norm_2.running_mean': blocks_1_out_5, 'blocks.1.norm_2.running_var': blocks_1_out_6, 'blocks.2.norm_1.num_batches_tracked': blocks_2_norm_1_add, 'blocks.2.norm_1.running_mean': blocks_2_norm_1_new_running_mean, 'blocks.2.norm_1.running_var': blocks_2_norm_1_new_running_var, 'blocks.2.norm_2.num_batches_tracked': blocks_2_norm_2_add, 'blocks.2.norm_2.running_mean': blocks_2_norm_2_new_running_mean, 'blocks.2.norm_2.running_var': blocks_2_norm_2_new_running_var, 'blocks.3.norm_1.num_batches_tracked': blocks_3_norm_1_add, 'blocks.3.norm_1.running_mean': blocks_3_norm_1_new_running_mean, 'blocks.3.norm_1.running_var': blocks_3_norm_1_new_running_var, 'blocks.3.norm_2.num_batches_tracked': blocks_3_norm_2_add, 'blocks.3.norm_2.running_mean': blocks_3_norm_2_new_running_mean, 'blocks.3.norm_2.running_var': blocks_3_norm_2_new_running_var, 'norm.num_batches_tracked': norm_add, 'norm.running_mean': norm_new_running_mean, 'norm.running_var': norm_new_running_var})


MESH = rt.Mesh(
    (
        rt.Axis('data', 4, ((2, 2), (2, 1))),
    )
)

PROGRAM = rt.Program(
    name='CNN',
    mesh=MESH,
    inputs=(
        rt.TensorSpec('image', (8, 3, 12, 12), 'float32', (('data', 2), (3,), (12,), (12,))),
        rt.TensorSpec('labels', (8,), 'int64', (('data', 2),)),
    ),
    buffers=(
        rt.TensorSpec('norm.running_mean', (6,), 'float32', ((6,),)),
        rt.TensorSpec('norm.running_var', (6,), 'float32', ((6,),)),
        rt.TensorSpec('norm.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.0.norm_1.running_mean', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.0.norm_1.running_var', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.0.norm_1.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.0.norm_2.running_mean', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.0.norm_2.running_var', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.0.norm_2.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.1.norm_1.running_mean', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.1.norm_1.running_var', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.1.norm_1.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.1.norm_2.running_mean', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.1.norm_2.running_var', (6,), 'float32', ((6,),)),
        rt.TensorSpec('blocks.1.norm_2.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.2.norm_1.running_mean', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.2.norm_1.running_var', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.2.norm_1.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.2.norm_2.running_mean', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.2.norm_2.running_var', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.2.norm_2.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.3.norm_1.running_mean', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.3.norm_1.running_var', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.3.norm_1.num_batches_tracked', (), 'int64', ()),
        rt.TensorSpec('blocks.3.norm_2.running_mean', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.3.norm_2.running_var', (12,), 'float32', ((12,),)),
        rt.TensorSpec('blocks.3.norm_2.num_batches_tracked', (), 'int64', ()),
    ),
    parameters=(
        rt.ParameterSpec('stem.weight', (6, 3, 3, 3), 'float32', ((6,), (3,), (3,), (3,))),
        rt.ParameterSpec('norm.weight', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('norm.bias', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.0.conv_1.weight', (6, 6, 3, 3), 'float32', ((6,), (6,), (3,), (3,))),
        rt.ParameterSpec('blocks.0.norm_1.weight', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.0.norm_1.bias', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.0.conv_2.weight', (6, 6, 3, 3), 'float32', ((6,), (6,), (3,), (3,))),
        rt.ParameterSpec('blocks.0.norm_2.weight', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.0.norm_2.bias', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.1.conv_1.weight', (6, 6, 3, 3), 'float32', ((6,), (6,), (3,), (3,))),
        rt.ParameterSpec('blocks.1.norm_1.weight', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.1.norm_1.bias', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.1.conv_2.weight', (6, 6, 3, 3), 'float32', ((6,), (6,), (3,), (3,))),
        rt.ParameterSpec('blocks.1.norm_2.weight', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.1.norm_2.bias', (6,), 'float32', ((6,),)),
        rt.ParameterSpec('blocks.2.conv_1.weight', (12, 6, 3, 3), 'float32', ((12,), (6,), (3,), (3,))),
        rt.ParameterSpec('blocks.2.norm_1.weight', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.2.norm_1.bias', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.2.conv_2.weight', (12, 12, 3, 3), 'float32', ((12,), (12,), (3,), (3,))),
        rt.ParameterSpec('blocks.2.norm_2.weight', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.2.norm_2.bias', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.2.skip.weight', (12, 6, 1, 1), 'float32', ((12,), (6,), (), ())),
        rt.ParameterSpec('blocks.3.conv_1.weight', (12, 12, 3, 3), 'float32', ((12,), (12,), (3,), (3,))),
        rt.ParameterSpec('blocks.3.norm_1.weight', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.3.norm_1.bias', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.3.conv_2.weight', (12, 12, 3, 3), 'float32', ((12,), (12,), (3,), (3,))),
        rt.ParameterSpec('blocks.3.norm_2.weight', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('blocks.3.norm_2.bias', (12,), 'float32', ((12,),)),
        rt.ParameterSpec('head.weight', (12, 12), 'float32', ((12,), (12,))),
        rt.ParameterSpec('head.bias', (12,), 'float32', ((12,),)),
    ),
    step=(
        rt.StepNode('REDUCE', 'all_reduce', ('data',), bucket_bytes=1048576, parameters=(
            'stem.weight', 'norm.weight', 'norm.bias', 'blocks.0.conv_1.weight',
            'blocks.0.norm_1.weight', 'blocks.0.norm_1.bias', 'blocks.0.conv_2.weight',
            'blocks.0.norm_2.weight', 'blocks.0.norm_2.bias', 'blocks.1.conv_1.weight',
            'blocks.1.norm_1.weight', 'blocks.1.norm_1.bias', 'blocks.1.conv_2.weight',
            'blocks.1.norm_2.weight', 'blocks.1.norm_2.bias', 'blocks.2.conv_1.weight',
            'blocks.2.norm_1.weight', 'blocks.2.norm_1.bias', 'blocks.2.conv_2.weight',
            'blocks.2.norm_2.weight', 'blocks.2.norm_2.bias', 'blocks.2.skip.weight',
            'blocks.3.conv_1.weight', 'blocks.3.norm_1.weight', 'blocks.3.norm_1.bias',
            'blocks.3.conv_2.weight', 'blocks.3.norm_2.weight', 'blocks.3.norm_2.bias',
            'head.weight', 'head.bias',
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
