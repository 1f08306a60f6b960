"""The gradients of the front end: what front_kernels.py computes once more, and back.

`front_gradients_kernel` walks through the tokens from last to first and goes back through the convolution;
`input_gradients_kernel` then adds up the copies of each channel.
"""

import triton
import triton.language as tl

from runningtensor.layers.front_kernels import (
    EPS,
    GATES,
    KEYS,
    TAU,
    VALUES,
    begin,
    convolved,
    dot,
    lanes,
    log_sigmoid,
    one_kind,
    sigmoid,
    silu,
    silu_gradient,
    standing,
    token,
    window,
)


@triton.jit
def given_at(
    s,
    dout,
    dgone,
    position,
    mask,
    T,
    rows,
    real,
    N: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    SLOT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Of token t + s of each row: the gradients of its channels and of the slot or what its gate became, and how it
    stands."""
    h, t, there, row, width = rows
    w = tl.arange(0, W)[None, :]
    inside = there & (t + s >= 0) & (t + s < T)
    place = tl.where(inside, (row + s) * H + h, 0)  # else heads would go to neighbouring lanes, by way of memory
    at = dout + (place * (width + SLOT) + SLOT + w)
    found = ()
    for j in tl.static_range(N):
        found += (tl.load(at + j * W, mask=inside & real[j], other=0.0).to(tl.float32),)
    other = w * 0.0
    if SLOT == 1:
        other = tl.load(dout + (place * (width + 1) + w * 0), mask=inside, other=0.0).to(tl.float32)
    if dgone is not None:
        other = tl.load(dgone + (place + w * 0), mask=inside, other=0.0).to(tl.float32)
    age, kept = standing(position, mask, t + s, row + s, inside, w, PACKED)
    return found, other, age, kept


@triton.jit
def walk_back(
    KIND: tl.constexpr,
    WIDEST: tl.constexpr,
    role,
    dgone,
    given,
    SHAPE: tl.constexpr,
    GATED: tl.constexpr,
    BARE: tl.constexpr,
    SLOT: tl.constexpr,
    TELESCOPING: tl.constexpr,
):
    """From the last token to the first. The tokens just after the span are walked through too: the convolution takes
    their gradients to tokens within it."""
    width, _, _, dout = role
    x, conv, position, mask, dfused, dconv, B, T = given
    H: tl.constexpr = SHAPE[0]
    X: tl.constexpr = SHAPE[2]
    F: tl.constexpr = SHAPE[3]
    SIZE: tl.constexpr = SHAPE[4]
    SPAN: tl.constexpr = SHAPE[5]
    LANES: tl.constexpr = SHAPE[6]
    EXTRA: tl.constexpr = SHAPE[7]
    PACKED: tl.constexpr = SHAPE[8]
    C: tl.constexpr = SHAPE[9]
    LAST: tl.constexpr = SPAN + SIZE - 2
    W: tl.constexpr = lanes(WIDEST)
    N: tl.constexpr = (WIDEST + W - 1) // W
    R: tl.constexpr = LANES // W
    w = tl.arange(0, W)[None, :]
    h, t, there, x, source, first, row, c, real, taps, at = begin(role, x, conv, B, T, SHAPE, GATED, BARE, W, N)
    if mask is not None:
        mask += first
    if GATED:
        real = real[:N] + (w == 0,)  # once
    seen = window(x, at, source, t, LAST, there, T, X, EXTRA, SIZE)
    dout += first * (H * (width + SLOT))
    dfused += first * F
    nothing = tl.zeros([R, W], tl.float32)
    pending = (nothing,) * (len(at) * (SIZE - 1))  # gradients of tokens before, as far as they are known
    dtaps = (nothing,) * (len(at) * SIZE)
    steps = tl.where(tl.program_id(0) * R < B * tl.cdiv(T, SPAN) * H, SPAN + SIZE - 1, 0)
    if dgone is not None:
        dgone += first * H
    rows = (h, t, there, row, width)
    coming = given_at(LAST, dout, dgone, position, mask, T, rows, real, N, W, H, SLOT, PACKED)
    for i in range(steps):
        s = LAST - i
        own = there & (t + s < T) & (s + w * 0 < SPAN)  # a tensor in the interpreter too, as its masks must be
        d, other, age, kept = coming
        # Asked for a token ahead, as its channels are: who asks when it is needed waits.
        coming = given_at(s - 1, dout, dgone, position, mask, T, rows, real, N, W, H, SLOT, PACKED)
        before = token(x, at, source, t, s - SIZE, there, T, X, EXTRA)
        y = convolved(seen, taps, age, SIZE, PACKED)
        z = y[len(y) - 1]
        if KIND == GATES:
            dy = d
            if GATED:
                beta = sigmoid(z)
                dy += (other * beta * (1.0 - beta),)
        elif KIND == VALUES:
            dy = ()
            scale = tl.full([1, W], 1.0, tl.float32)
            if GATED:
                g = log_sigmoid(z) / TAU
                if TELESCOPING:
                    scale = tl.exp(-g)
                    dg = other * tl.exp(g) - scale * dot(silu(y, N), d, N)
                else:
                    dg = other * kept
            for j in tl.static_range(N):
                dy += (silu_gradient(scale * d[j], y[j]),)
            if GATED:
                dy += (dg * sigmoid(-z) / TAU,)
        else:
            dy = ()
            act = silu(y, N)
            length = dot(act, act, N)
            norm = tl.rsqrt(length + EPS)
            along = dot(act, d, N) * norm
            scale = along * 0.0 + 1.0
            if KIND == KEYS:
                along *= kept
                scale = kept
            aside = along
            if SLOT == 1:
                d0 = other
                xi, one = 1.0, 1.0
                if KIND == KEYS:
                    d0 *= kept
                else:
                    xi = sigmoid(z)
                    one = 1.0 - xi
                length *= norm * norm
                r = tl.rsqrt(length * xi * xi + one * one + EPS)
                total = (xi * along + one * d0) * r * r
                along = r * (along - xi * length * total)
                dz = (along - r * (d0 - one * total)) * xi * one
                scale *= xi * r
                aside = xi * (xi * r * total + along)
            for j in tl.static_range(N):
                dy += (silu_gradient(norm * (scale * d[j] - aside * norm * act[j]), y[j]),)
            if GATED:
                dy += (dz,)
        known, sums, now = (), (), ()
        for j in tl.static_range(len(at)):
            full = taps[j * SIZE + SIZE - 1] * dy[j]
            if SIZE > 1:
                full += pending[j * (SIZE - 1)]
            into = dfused + ((row + s) * F + c[0]) + j * W if j < N else dfused + ((row + s) * F + c[j])
            tl.store(into, full.to(dfused.dtype.element_ty), mask=own & real[j])
            for k in tl.static_range(1, SIZE):
                part = taps[j * SIZE + SIZE - 1 - k] * dy[j]
                if PACKED:
                    part = tl.where(age >= k, part, 0.0)
                if k + 1 < SIZE:
                    part += pending[j * (SIZE - 1) + k]
                known += (part,)
            counted = tl.where(own, dy[j], 0.0)
            for k in tl.static_range(SIZE):
                read = seen[j * SIZE + k]
                if PACKED:
                    read = tl.where(age >= SIZE - 1 - k, read, 0.0)
                sums += (dtaps[j * SIZE + k] + counted * read,)
            now += (before[j],) + seen[j * SIZE : (j + 1) * SIZE - 1]
        pending, dtaps, seen = known, sums, now
    span = (tl.program_id(0) * R + tl.arange(0, R)[:, None]) // H
    dconv += span.to(tl.int64) * (C * SIZE)
    for j in tl.static_range(len(at)):
        for k in tl.static_range(SIZE):
            if j >= N or not BARE:
                tl.store(dconv + c[j] * SIZE + k, dtaps[j * SIZE + k], mask=there & real[j])


@triton.jit(do_not_specialize=["B", "T"])
def front_gradients_kernel(
    x,
    conv,
    position,
    mask,
    dqueries,
    dkeys,
    dvalues,
    dbeta,
    dforget,
    dgate,
    dfused,  # [B,T,F]: of what the convolution read; channels that nothing reads are left alone
    dconv,  # [B·spans,C,SIZE] float32, likewise
    B,
    T,
    KEY_DIMS: tl.constexpr,
    STARTS: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,
    PACKED: tl.constexpr,
):
    SHAPE: tl.constexpr = (H, D, X, F, SIZE, SPAN, LANES, EXTRA, PACKED, C)
    given = (x, conv, position, mask, dfused, dconv, B, T)
    made = (dqueries, dkeys, dvalues, dbeta, dforget, dgate)
    one_kind(walk_back, given, made, SHAPE, KEY_DIMS, STARTS, V, SKIP, TELESCOPING, GATE_CONV)


@triton.jit
def input_gradients_kernel(
    dfused, dx, rows, D: tl.constexpr, X: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr
):
    """Adds up the copies of each column of x [rows,X]."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    d = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    y = tl.zeros([BR, BD], tl.float32)
    for start in range(0, F, D):
        c = start + d
        copy = tl.load(dfused + i * F + c, mask=(i < rows) & (d < D) & (c < F), other=0.0).to(tl.float32)
        if X > D:
            copy = tl.where((c == 0) | (c == F - 1), 0.0, copy)
        y += copy
    if X > D:
        c = tl.where(d == D, 0, F - 1)
        y += tl.load(dfused + i * F + c, mask=(i < rows) & (d >= D) & (d < X), other=0.0).to(tl.float32)
    tl.store(dx + i * X + d, y.to(dx.dtype.element_ty), mask=(i < rows) & (d < X))
