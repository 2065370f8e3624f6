"""Layers as models have them: linear, convolution, normalisation, recurrent, attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzzing.blocks.base import TOKENS, WIDTH, Computed, Plain, block, linear, weight


@block
def dense() -> nn.Module:
    """Make a linear layer."""
    return Plain(linear())


@block
def dense_without_bias() -> nn.Module:
    """Make one without a bias."""
    return Plain(nn.Linear(WIDTH, WIDTH, bias=False))


@block
def mlp() -> nn.Module:
    """Make two of them."""
    return Plain(nn.Sequential(linear(WIDTH, 16), nn.GELU(), linear(16, WIDTH)))


@block
def deep() -> nn.Module:
    """Make many small gradients."""
    layers = [layer for _ in range(5) for layer in (linear(), nn.Tanh())]
    return Plain(nn.Sequential(*layers))


@block
def wide() -> nn.Module:
    """Make gradients that are larger than a bucket."""
    return Plain(nn.Sequential(linear(WIDTH, 512), nn.Tanh(), linear(512, WIDTH)))


@block
def swiglu() -> nn.Module:
    """Make a gated MLP."""
    return Computed(
        lambda m, x, _: m.down(F.silu(m.gate(x)) * m.up(x)),
        gate=linear(WIDTH, 16),
        up=linear(WIDTH, 16),
        down=linear(16, WIDTH),
    )


@block
def glu() -> nn.Module:
    """Make a gated linear unit."""
    return Plain(nn.Sequential(linear(WIDTH, 16), nn.GLU()))


@block
def bilinear() -> nn.Module:
    """Make a weight of three dimensions."""
    return Computed(lambda m, x, _: m.inner(x, x), inner=nn.Bilinear(WIDTH, WIDTH, WIDTH))


@block
def low_rank() -> nn.Module:
    """Make an adapter of rank 2 beside a frozen layer."""
    frozen = linear().requires_grad_(False)
    return Computed(
        lambda m, x, _: m.frozen(x) + x @ m.a @ m.b, frozen=frozen, a=weight(8, 2), b=weight(2, 8)
    )


@block
def conv1d() -> nn.Module:
    """Make a convolution over 2 channels."""
    return Plain(nn.Conv1d(2, 2, 3, padding=1), 2, 4)


@block
def conv1d_circular() -> nn.Module:
    """Make a convolution that pads by its input."""
    return Plain(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular", bias=False), 2, 4)


@block
def conv2d() -> nn.Module:
    """Make a convolution of small images."""
    return Plain(nn.Conv2d(2, 2, 3, padding=1), 2, 2, 2)


@block
def conv2d_channels_last() -> nn.Module:
    """Make one whose weight's channels are last in memory."""
    conv = nn.Conv2d(2, 2, 3, padding=1)
    return Plain(conv.to(memory_format=torch.channels_last), 2, 2, 2)  # type: ignore[call-overload]


@block
def conv2d_grouped() -> nn.Module:
    """Make a convolution a channel."""
    return Plain(nn.Conv2d(2, 2, 3, padding=1, groups=2), 2, 2, 2)


@block
def conv3d() -> nn.Module:
    """Make a convolution of cubes."""
    return Plain(nn.Conv3d(1, 1, 3, padding=1), 1, 2, 2, 2)


@block
def transposed_conv1d() -> nn.Module:
    """Make a transposed convolution."""
    return Plain(nn.ConvTranspose1d(2, 2, 3, padding=1), 2, 4)


@block
def transposed_conv2d() -> nn.Module:
    """Make a transposed convolution of images, with a stride."""
    return Plain(nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2), nn.AvgPool2d(2)), 2, 2, 2)


@block
def lazy() -> nn.Module:
    """Make a layer that learnt its width from a first call."""
    layer = nn.LazyLinear(WIDTH)
    layer(torch.zeros(2, WIDTH))
    return Plain(layer)


@block
def layer_norm() -> nn.Module:
    """Make LayerNorm."""
    return Plain(nn.LayerNorm(WIDTH))


@block
def rms_norm() -> nn.Module:
    """Make RMSNorm."""
    return Plain(nn.RMSNorm(WIDTH))


@block
def group_norm() -> nn.Module:
    """Make GroupNorm."""
    return Plain(nn.GroupNorm(1, 2), 2, 4)


@block
def instance_norm() -> nn.Module:
    """Make InstanceNorm with weights and statistics."""
    return Plain(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, 4)


@block
def batch_norm() -> nn.Module:
    """Make BatchNorm, whose buffers change in each forward."""
    return Plain(nn.BatchNorm1d(2), 2, 4)


@block
def batch_norm_2d() -> nn.Module:
    """Make BatchNorm behind a convolution."""
    return Plain(nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()), 2, 2, 2)


@block
def batch_norm_counting() -> nn.Module:
    """Make BatchNorm that averages by its count of batches."""
    return Plain(nn.BatchNorm1d(2, momentum=None), 2, 4)


@block
def batch_norm_frozen() -> nn.Module:
    """Make BatchNorm without weights."""
    return Plain(nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Conv1d(2, 2, 1)), 2, 4)


@block
def embedding() -> nn.Module:
    """Make an embedding of the tokens."""
    return Computed(lambda m, x, t: x + m.table(t), table=nn.Embedding(TOKENS, WIDTH))


@block
def embedding_padded() -> nn.Module:
    """Make an embedding with a row that gets no gradient."""
    table = nn.Embedding(TOKENS, WIDTH, padding_idx=0)
    return Computed(lambda m, x, t: x * torch.tanh(m.table(t)), table=table)


@block
def embedding_bag() -> nn.Module:
    """Make a bag of two tokens."""
    table = nn.EmbeddingBag(TOKENS, WIDTH, mode="mean")
    return Computed(lambda m, x, t: x + m.table(torch.stack([t, (t + 1) % TOKENS], 1)), table=table)


@block
def embedding_tied() -> nn.Module:
    """Make an embedding that is also the layer of the logits."""
    table = nn.Embedding(TOKENS, WIDTH)
    return Computed(
        lambda m, x, t: ((x + m.table(t)) @ m.table.weight.t()).softmax(1) @ m.table.weight,
        table=table,
    )


@block
def rnn() -> nn.Module:
    """Make an RNN over two time steps."""
    return Computed(_recur, inner=nn.RNN(4, 4, batch_first=True))


@block
def gru() -> nn.Module:
    """Make a GRU."""
    return Computed(_recur, inner=nn.GRU(4, 4, batch_first=True))


@block
def lstm() -> nn.Module:
    """Make an LSTM of two layers."""
    return Computed(_recur, inner=nn.LSTM(4, 4, num_layers=2, batch_first=True))


def _recur(m: Computed, x: Tensor, _: Tensor) -> Any:
    return m.inner(x.reshape(-1, 2, 4))[0].reshape(-1, WIDTH)


@block
def lstm_cell() -> nn.Module:
    """Make a scan by a Python loop."""

    def scan(m: Computed, x: Tensor, _: Tensor) -> Any:
        state = (x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4))
        outputs = []
        for step in x.reshape(-1, 2, 4).unbind(1):
            state = m.cell(step, state)
            outputs.append(state[0])
        return torch.cat(outputs, 1)

    return Computed(scan, cell=nn.LSTMCell(4, 4))


@block
def gru_cell() -> nn.Module:
    """Make a cell that sees a row once."""
    return Computed(lambda m, x, _: m.cell(x, torch.tanh(x)), cell=nn.GRUCell(WIDTH, WIDTH))


@block
def attention() -> nn.Module:
    """Make torch's attention."""

    def attend(m: Computed, x: Tensor, _: Tensor) -> Any:
        x = x.reshape(-1, 2, 4)
        return m.inner(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)

    return Computed(attend, inner=nn.MultiheadAttention(4, 2, batch_first=True))


@block
def attention_causal() -> nn.Module:
    """Make attention of projections cut from one, with scaled_dot_product_attention."""

    def attend(m: Computed, x: Tensor, _: Tensor) -> Any:
        q, k, v = m.projections(x.reshape(-1, 2, 4)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.out(y).reshape(-1, WIDTH)

    return Computed(attend, projections=linear(4, 12), out=linear(4, 4))


@block
def attention_by_hand() -> nn.Module:
    """Make attention from its parts, with a relative bias."""

    def attend(m: Computed, x: Tensor, _: Tensor) -> Any:
        x = x.reshape(-1, 2, 4)
        scores = torch.einsum("bid,de,bje->bij", x, m.qk, x) + m.bias
        return torch.einsum("bij,bjd->bid", scores.softmax(-1), m.value(x)).reshape(-1, WIDTH)

    return Computed(attend, qk=weight(4, 4), bias=weight(2, 2), value=linear(4, 4))


@block
def transformer_layer() -> nn.Module:
    """Make torch's transformer layer."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return Plain(layer, 2, 4)


@block
def experts() -> nn.Module:
    """Make a dense mixture of two experts."""
    return Computed(
        lambda m, x, _: torch.einsum(
            "bk,bkd->bd", m.router(x).softmax(1), torch.stack([m.a(x), m.b(x)], 1)
        ),
        router=linear(WIDTH, 2),
        a=linear(),
        b=linear(),
    )


@block
def dropout() -> nn.Module:
    """Make dropout that drops nothing."""
    return Plain(nn.Sequential(linear(), nn.Dropout(0.0), nn.PReLU()))


@block
def prelu() -> nn.Module:
    """Make a slope a channel."""
    return Plain(nn.PReLU(2), 2, 4)


@block
def residual() -> nn.Module:
    """Make a residual of a normalised MLP."""
    inner = nn.Sequential(nn.LayerNorm(WIDTH), linear(WIDTH, 16), nn.SiLU(), linear(16, WIDTH))
    return Computed(lambda m, x, _: x + m.inner(x), inner=inner)


@block
def upsample() -> nn.Module:
    """Make a convolution between an upsampling and a pooling."""
    return Plain(
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(2, 2, 1), nn.AvgPool1d(2)), 2, 4
    )
