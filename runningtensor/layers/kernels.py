"""The front end of the layer and its gated norm as Triton kernels: what running_tensor.py computes in a dozen passes.

`front_kernel` reads x, repeats and mixes its channels, convolves them over time and forms queries, keys, values and
gates, a block of tokens of one head at a time; nothing as wide as the projection is written. Backward,
`front_gradients_kernel` does that again and writes the gradient of what the convolution gave, and
`input_gradients_kernel` takes it through the convolution and the mixing to x. Sums over tokens are left in one row for
each block of tokens, to be added in one order.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # of norms.l2_normalize
TAU = tl.constexpr(16.0)


@triton.jit
def tokens(position, T, BT: tl.constexpr, EXTRA: tl.constexpr, PACKED: tl.constexpr):
    """Of this block: its sequence, the places of its tokens in it, which are there, and how many come before each."""
    blocks = tl.cdiv(T, BT)
    t = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT)
    age = t + EXTRA
    if PACKED:
        age = tl.load(position + t, mask=t < T, other=0).to(tl.int32)
    return (tl.program_id(0) // blocks).to(tl.int64), t, t < T, age


@triton.jit
def repeated(x, c, there, real, D: tl.constexpr):
    """x̃ at channels c [BT,W], in float32; x are pointers to rows [BT]."""
    return tl.load(x[:, None] + (c % D)[None, :], mask=there[:, None] & real[None, :], other=0.0).to(tl.float32)


@triton.jit
def mixed(x, taps, c, there, real, D: tl.constexpr, F: tl.constexpr, MIX: tl.constexpr):
    """What the convolution reads at channels c."""
    y = repeated(x, c, there, real, D)
    if MIX:
        y *= tl.load(taps + 1).to(tl.float32)
        y += tl.load(taps).to(tl.float32) * repeated(x, c + D - 1, there, real & (c > 0), D)
        y += tl.load(taps + 2).to(tl.float32) * repeated(x, c + 1, there, real & (c < F - 1), D)
    return y


@triton.jit
def convolved(here, c, real, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, MIX: tl.constexpr):
    """Channels c after the short convolution [BT,W]."""
    x, taps, conv, t, age, inside = here
    y = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    for s in tl.static_range(SIZE):
        tap = tl.load(conv + c * SIZE + (SIZE - 1 - s), mask=real, other=0.0).to(tl.float32)
        y += mixed(x + (t - s) * D, taps, c, inside & (age >= s), real, D, F, MIX) * tap[None, :]
    return y


@triton.jit
def channel(here, c, D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, MIX: tl.constexpr):
    """One channel after the short convolution [BT]."""
    one = tl.arange(0, 1)
    return tl.sum(convolved(here, c + one, one == 0, D, F, C, SIZE, MIX), 1)


@triton.jit
def unit(x):
    """1/|x| of each row, where a row may be zero."""
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["T"])
def front_kernel(
    x,  # [B,EXTRA+T,D]
    taps,  # MIX: [3]
    conv,  # [C,SIZE]
    position,  # PACKED: [T]
    mask,  # [B,T] or None
    queries,  # a tuple of [B,T,H,K_i+SKIP]
    keys,
    values,  # [B,T,H,V]
    beta,  # [B,T,H], or None without the delta rule
    forget,  # [B,T,H] float32: exp(g) if TELESCOPING, else g; or None
    gate,  # [B,T,H·V]
    T,
    KEY_DIMS: tl.constexpr,
    STARTS: tl.constexpr,  # channels at which q, k, u, r, v, a, b, z1, z2 and g_out begin
    V: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    MIX: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,  # tokens before the first, of which x has rows and nothing is asked
    PACKED: tl.constexpr,
):
    b, t, inside, age = tokens(position, T, BT, EXTRA, PACKED)
    h = tl.program_id(1)
    row = b * T + t
    x += (b * (T + EXTRA) + EXTRA) * D
    here = (x, taps, conv, t, age, inside)
    kept = tl.full([BT], 1.0, tl.float32)
    if mask is not None:
        kept = tl.load(mask + row, mask=inside, other=0).to(tl.float32)
    dt = values.dtype.element_ty
    N: tl.constexpr = len(KEY_DIMS)
    w = tl.arange(0, KP)
    for i in tl.static_range(N):
        real = w < KEY_DIMS[i]
        c = h * KEY_DIMS[i] + w
        q = convolved(here, STARTS[2 * i] + c, real, D, F, C, SIZE, MIX)
        k = convolved(here, STARTS[2 * i + 1] + c, real, D, F, C, SIZE, MIX)
        q *= tl.sigmoid(q)
        k *= tl.sigmoid(k)
        q *= unit(q)[:, None]
        k *= unit(k)[:, None]
        at = (row * H + h) * (KEY_DIMS[i] + SKIP)
        if SKIP:  # [1 - ξ, ξq] and [1, k], of length one
            xi = tl.sigmoid(channel(here, STARTS[2 * N + 3 + i] + h, D, F, C, SIZE, MIX))
            q *= xi[:, None]
            norm = tl.rsqrt(tl.sum(q * q, 1) + (1.0 - xi) * (1.0 - xi) + EPS)
            q *= norm[:, None]
            tl.store(queries[i] + at, ((1.0 - xi) * norm).to(dt), mask=inside)
            norm = tl.rsqrt(tl.sum(k * k, 1) + 1.0 + EPS)
            k *= norm[:, None]
            tl.store(keys[i] + at, (norm * kept).to(dt), mask=inside)
        into = (at + SKIP)[:, None] + w[None, :]
        both = inside[:, None] & real[None, :]
        tl.store(queries[i] + into, q.to(dt), mask=both)
        tl.store(keys[i] + into, (k * kept[:, None]).to(dt), mask=both)

    o = tl.arange(0, VP)
    real = o < V
    into = ((row * H + h) * V)[:, None] + o[None, :]
    both = inside[:, None] & real[None, :]
    v = convolved(here, STARTS[2 * N] + h * V + o, real, D, F, C, SIZE, MIX)
    v *= tl.sigmoid(v)
    if forget is not None:
        g = log_sigmoid(channel(here, STARTS[2 * N + 1] + h, D, F, C, SIZE, MIX)) / TAU
        if TELESCOPING:
            v *= tl.exp(-g)[:, None]
            tl.store(forget + row * H + h, tl.exp(g), mask=inside)
        else:
            tl.store(forget + row * H + h, g * kept, mask=inside)
    tl.store(values + into, v.to(dt), mask=both)
    if beta is not None:
        y = tl.sigmoid(channel(here, STARTS[2 * N + 2] + h, D, F, C, SIZE, MIX))
        tl.store(beta + row * H + h, y.to(dt), mask=inside)
    c = STARTS[len(STARTS) - 1] + h * V + o
    if GATE_CONV:
        y = convolved(here, c, real, D, F, C, SIZE, MIX)
    else:
        y = mixed(x + t * D, taps, c, inside, real, D, F, MIX)
    tl.store(gate + into, y.to(dt), mask=both)


@triton.jit
def leave(
    dy,
    here,
    dfused,
    dconv,
    row,
    c,
    real,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    MIX: tl.constexpr,
    CONV: tl.constexpr,
):
    """Writes the gradient of channels c after the convolution, and the block's part of those of its weights.

    Returns the block's part of the gradient of the three taps of the mixing.
    """
    x, taps, conv, t, age, inside = here
    dt = dfused.dtype.element_ty
    tl.store(dfused + row[:, None] * F + c[None, :], dy.to(dt), mask=inside[:, None] & real[None, :])
    first = 0.0
    second = 0.0
    third = 0.0
    for s in tl.static_range(SIZE if CONV else 1):
        tap = tl.full([c.shape[0]], 1.0, tl.float32)
        if CONV:
            part = tl.sum(dy * mixed(x + (t - s) * D, taps, c, inside & (age >= s), real, D, F, MIX), 0)
            tl.store(dconv + c * SIZE + (SIZE - 1 - s), part, mask=real)
            tap = tl.load(conv + c * SIZE + (SIZE - 1 - s), mask=real, other=0.0).to(tl.float32)
        if MIX:
            dm = dy * tap[None, :]
            there = inside & (age >= s)
            first += tl.sum(dm * repeated(x + (t - s) * D, c + D - 1, there, real & (c > 0), D))
            second += tl.sum(dm * repeated(x + (t - s) * D, c, there, real, D))
            third += tl.sum(dm * repeated(x + (t - s) * D, c + 1, there, real & (c < F - 1), D))
    return first, second, third


@triton.jit
def silu_gradient(dy, x):
    """Of SiLU at x, given that of SiLU(x)."""
    s = tl.sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@triton.jit
def unit_gradient(dy, x, norm):
    """Of x, given that of x/|x| and norm = 1/|x|."""
    return norm[:, None] * (dy - x * (norm * norm * tl.sum(dy * x, 1))[:, None])


@triton.jit(do_not_specialize=["T"])
def front_gradients_kernel(
    x,
    taps,
    conv,
    position,
    mask,
    dqueries,
    dkeys,
    dvalues,
    dbeta,
    dforget,
    dgate,
    dfused,  # [B,T,F]: of what the convolution gave
    dtaps,  # [blocks,H,3] float32
    dconv,  # [blocks,C,SIZE] float32
    T,
    KEY_DIMS: tl.constexpr,
    STARTS: tl.constexpr,
    V: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    MIX: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,  # tokens before the first, of which x has rows and nothing is asked
    PACKED: tl.constexpr,
):
    b, t, inside, age = tokens(position, T, BT, EXTRA, PACKED)
    h = tl.program_id(1)
    row = b * T + t
    x += (b * (T + EXTRA) + EXTRA) * D
    here = (x, taps, conv, t, age, inside)
    block = tl.program_id(0).to(tl.int64)
    dconv += block * (C * SIZE)
    kept = tl.full([BT], 1.0, tl.float32)
    if mask is not None:
        kept = tl.load(mask + row, mask=inside, other=0).to(tl.float32)
    N: tl.constexpr = len(KEY_DIMS)
    w = tl.arange(0, KP)
    one = tl.arange(0, 1)
    sole = one == 0
    d1 = 0.0
    d2 = 0.0
    d3 = 0.0
    for i in tl.static_range(N):
        real = w < KEY_DIMS[i]
        at = (row * H + h) * (KEY_DIMS[i] + SKIP)
        into = (at + SKIP)[:, None] + w[None, :]
        both = inside[:, None] & real[None, :]

        c = STARTS[2 * i] + h * KEY_DIMS[i] + w
        y = convolved(here, c, real, D, F, C, SIZE, MIX)
        a = y * tl.sigmoid(y)
        norm = unit(a)
        d = tl.load(dqueries[i] + into, mask=both, other=0.0).to(tl.float32)
        if SKIP:
            q = a * norm[:, None]
            z = channel(here, STARTS[2 * N + 3 + i] + h, D, F, C, SIZE, MIX)
            xi = tl.sigmoid(z)
            e = xi[:, None] * q
            r = tl.rsqrt(tl.sum(e * e, 1) + (1.0 - xi) * (1.0 - xi) + EPS)
            d0 = tl.load(dqueries[i] + at, mask=inside, other=0.0).to(tl.float32)
            dot = tl.sum(d * e, 1) + d0 * (1.0 - xi)
            d = r[:, None] * (d - e * (r * r * dot)[:, None])
            d0 = r * (d0 - (1.0 - xi) * r * r * dot)
            dz = (tl.sum(d * q, 1) - d0) * xi * (1.0 - xi)
            p1, p2, p3 = leave(
                dz[:, None],
                here,
                dfused,
                dconv,
                row,
                STARTS[2 * N + 3 + i] + h + one,
                sole,
                D,
                F,
                C,
                SIZE,
                MIX,
                True,
            )
            d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3
            d *= xi[:, None]
        d = silu_gradient(unit_gradient(d, a, norm), y)
        p1, p2, p3 = leave(d, here, dfused, dconv, row, c, real, D, F, C, SIZE, MIX, True)
        d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3

        c = STARTS[2 * i + 1] + h * KEY_DIMS[i] + w
        y = convolved(here, c, real, D, F, C, SIZE, MIX)
        a = y * tl.sigmoid(y)
        norm = unit(a)
        d = tl.load(dkeys[i] + into, mask=both, other=0.0).to(tl.float32) * kept[:, None]
        if SKIP:
            k = a * norm[:, None]
            r = tl.rsqrt(tl.sum(k * k, 1) + 1.0 + EPS)
            dot = tl.sum(d * k, 1) + tl.load(dkeys[i] + at, mask=inside, other=0.0).to(tl.float32) * kept
            d = r[:, None] * (d - k * (r * r * dot)[:, None])
        d = silu_gradient(unit_gradient(d, a, norm), y)
        p1, p2, p3 = leave(d, here, dfused, dconv, row, c, real, D, F, C, SIZE, MIX, True)
        d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3

    o = tl.arange(0, VP)
    real = o < V
    into = ((row * H + h) * V)[:, None] + o[None, :]
    both = inside[:, None] & real[None, :]
    c = STARTS[2 * N] + h * V + o
    y = convolved(here, c, real, D, F, C, SIZE, MIX)
    d = tl.load(dvalues + into, mask=both, other=0.0).to(tl.float32)
    da = tl.zeros([BT], tl.float32)
    if dforget is not None:
        z = channel(here, STARTS[2 * N + 1] + h, D, F, C, SIZE, MIX)
        g = log_sigmoid(z) / TAU
        dg = tl.load(dforget + row * H + h, mask=inside, other=0.0)
        if TELESCOPING:
            d *= tl.exp(-g)[:, None]
            dg = dg * tl.exp(g) - tl.sum(d * y * tl.sigmoid(y), 1)
        else:
            dg *= kept
        da = dg * tl.sigmoid(-z) / TAU
    p1, p2, p3 = leave(
        da[:, None], here, dfused, dconv, row, STARTS[2 * N + 1] + h + one, sole, D, F, C, SIZE, MIX, True
    )
    d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3
    d = silu_gradient(d, y)
    p1, p2, p3 = leave(d, here, dfused, dconv, row, c, real, D, F, C, SIZE, MIX, True)
    d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3
    db = tl.zeros([BT], tl.float32)
    if dbeta is not None:
        y = tl.sigmoid(channel(here, STARTS[2 * N + 2] + h, D, F, C, SIZE, MIX))
        db = tl.load(dbeta + row * H + h, mask=inside, other=0.0).to(tl.float32) * y * (1.0 - y)
    p1, p2, p3 = leave(
        db[:, None], here, dfused, dconv, row, STARTS[2 * N + 2] + h + one, sole, D, F, C, SIZE, MIX, True
    )
    d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3
    if not SKIP:  # channels that nothing reads
        for i in tl.static_range(len(STARTS) - 2 * N - 4):
            p1, p2, p3 = leave(
                db[:, None] * 0.0,
                here,
                dfused,
                dconv,
                row,
                STARTS[2 * N + 3 + i] + h + one,
                sole,
                D,
                F,
                C,
                SIZE,
                MIX,
                True,
            )
    d = tl.load(dgate + into, mask=both, other=0.0).to(tl.float32)
    c = STARTS[len(STARTS) - 1] + h * V + o
    p1, p2, p3 = leave(d, here, dfused, dconv, row, c, real, D, F, C, SIZE, MIX, GATE_CONV)
    d1, d2, d3 = d1 + p1, d2 + p2, d3 + p3
    if MIX:
        dtaps += (block * H + h) * 3
        tl.store(dtaps, d1)
        tl.store(dtaps + 1, d2)
        tl.store(dtaps + 2, d3)


@triton.jit
def unconvolved(
    dfused,
    conv,
    t,
    T,
    position,
    c,
    real,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The gradient of what the convolution read at channels c [BT,W]; dfused points to the sequence."""
    y = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    for s in tl.static_range(SIZE):
        there = t + s < T
        if PACKED:  # token t + s is of the same sequence if it is old enough
            there = there & (tl.load(position + t + s, mask=there, other=0) >= s)
        d = tl.load(
            dfused + (t + s)[:, None] * F + c[None, :], mask=there[:, None] & (real & (c < C))[None, :], other=0.0
        )
        tap = tl.load(conv + c * SIZE + (SIZE - 1 - s), mask=real & (c < C), other=0.0).to(tl.float32)
        y += d.to(tl.float32) * tap[None, :]
    if C < F:  # the rest was not convolved
        y += tl.load(
            dfused + t[:, None] * F + c[None, :], mask=(t < T)[:, None] & (real & (c >= C))[None, :], other=0.0
        )
    return y


@triton.jit(do_not_specialize=["T"])
def input_gradients_kernel(
    dfused,
    taps,
    conv,
    position,
    dx,
    T,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    MIX: tl.constexpr,
    PACKED: tl.constexpr,
):
    b, t, inside, _ = tokens(position, T, BT, 0, PACKED)
    dfused += b * T * F
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    y = tl.zeros([BT, BD], tl.float32)
    for start in range(0, F, D):  # each copy of x
        c = start + d
        real = (d < D) & (c < F)
        part = unconvolved(dfused, conv, t, T, position, c, real, F, C, SIZE, PACKED)
        if MIX:
            part *= tl.load(taps + 1).to(tl.float32)
            near = (d < D) & (c + 1 < F)  # its neighbour above read it with the first tap
            part += tl.load(taps).to(tl.float32) * unconvolved(
                dfused, conv, t, T, position, c + 1, near, F, C, SIZE, PACKED
            )
            near = real & (c > 0)  # and that below with the last
            part += tl.load(taps + 2).to(tl.float32) * unconvolved(
                dfused, conv, t, T, position, c - 1, near, F, C, SIZE, PACKED
            )
        y += part
    at = (b * T + t)[:, None] * D + d[None, :]
    tl.store(dx + at, y.to(dx.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def norm_kernel(x, gate, scale, weight, out, rows, eps, V: tl.constexpr, BR: tl.constexpr, VP: tl.constexpr):
    """RMSNorm(scale x) ⊙ SiLU(gate) of BR rows of V."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o = tl.arange(0, VP)
    at = i[:, None] * V + o[None, :]
    both = (i < rows)[:, None] & (o < V)[None, :]
    y = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
    if scale is not None:
        y *= tl.load(scale + i, mask=i < rows, other=0.0).to(tl.float32)[:, None]
    y *= tl.rsqrt(tl.sum(y * y, 1) / V + eps)[:, None]
    y *= tl.load(weight + o, mask=o < V, other=0.0).to(tl.float32)[None, :]
    g = tl.load(gate + at, mask=both, other=0.0).to(tl.float32)
    tl.store(out + at, (y * g * tl.sigmoid(g)).to(out.dtype.element_ty), mask=both)


@triton.jit
def norm_gradients_kernel(
    x,
    gate,
    scale,
    weight,
    dout,
    dx,
    dgate,
    dscale,
    dweight,  # [blocks,V] float32
    rows,
    eps,
    V: tl.constexpr,
    BR: tl.constexpr,
    VP: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o = tl.arange(0, VP)
    at = i[:, None] * V + o[None, :]
    both = (i < rows)[:, None] & (o < V)[None, :]
    given = tl.load(x + at, mask=both, other=0.0).to(tl.float32)
    s = tl.full([BR], 1.0, tl.float32)
    if scale is not None:
        s = tl.load(scale + i, mask=i < rows, other=0.0).to(tl.float32)
    y = given * s[:, None]
    norm = tl.rsqrt(tl.sum(y * y, 1) / V + eps)
    g = tl.load(gate + at, mask=both, other=0.0).to(tl.float32)
    w = tl.load(weight + o, mask=o < V, other=0.0).to(tl.float32)
    d = tl.load(dout + at, mask=both, other=0.0).to(tl.float32)
    n = y * norm[:, None]
    tl.store(dgate + at, silu_gradient(d * n * w[None, :], g).to(dgate.dtype.element_ty), mask=both)
    d *= g * tl.sigmoid(g)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * V + o, tl.sum(d * n, 0), mask=o < V)
    d *= w[None, :]
    d = norm[:, None] * (d - n * (tl.sum(d * n, 1) / V)[:, None])
    if scale is not None:
        tl.store(dscale + i, tl.sum(d * given, 1).to(dscale.dtype.element_ty), mask=i < rows)
    tl.store(dx + at, (d * s[:, None]).to(dx.dtype.element_ty), mask=both)
