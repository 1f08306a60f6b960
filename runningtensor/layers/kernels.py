"""The front end of the layer and its gated norm as Triton kernels: what running_tensor.py computes in a dozen passes.

`mix_kernel` mixes the channels of x. `front_kernel` reads the result, repeats channels, convolves them over time and
forms queries, keys, values and gates, a block of tokens of one head at a time; nothing as wide as the projection is
written. Backward, `front_gradients_kernel` does that again and writes the gradient of what the convolution gave, and
`input_gradients_kernel` takes it through the convolution to x. Sums over tokens are left in one row for each block of
tokens, to be added in one order.

x [·,X] is what a projection's `compact` gives: channel c of d_fused is column c % D, but for the first and the last,
which have columns of their own where channels are mixed (X = D + 2), for there the mixing ends.
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
def load_row(x, i, d, rows, D: tl.constexpr, X: tl.constexpr):
    """Columns d, counted around, of rows i of x [rows,X]."""
    at = i[:, None] * X + ((d + D) % D)[None, :]
    return tl.load(x + at, mask=(i < rows)[:, None] & (d <= D)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_column(x, i, c, rows, X: tl.constexpr):
    return tl.load(x + i * X + c, mask=i < rows, other=0.0).to(tl.float32)


@triton.jit
def mix_kernel(x, taps, out, rows, D: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr):
    """ConcOnlyC.compact [rows,D+2]: each channel with its neighbours, then the first and the last of d_fused."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, DP)
    w0, w1, w2 = tl.load(taps).to(tl.float32), tl.load(taps + 1).to(tl.float32), tl.load(taps + 2).to(tl.float32)
    dt = out.dtype.element_ty
    y = (
        w0 * load_row(x, i, d - 1, rows, D, D)
        + w1 * load_row(x, i, d, rows, D, D)
        + w2 * load_row(x, i, d + 1, rows, D, D)
    )
    tl.store(out + i[:, None] * (D + 2) + d[None, :], y.to(dt), mask=(i < rows)[:, None] & (d < D)[None, :])
    first = w1 * load_column(x, i, 0, rows, D) + w2 * load_column(x, i, 1 % D, rows, D)
    last = w0 * load_column(x, i, (LAST - 1) % D, rows, D) + w1 * load_column(x, i, LAST % D, rows, D)
    tl.store(out + i * (D + 2) + D, first.to(dt), mask=i < rows)
    tl.store(out + i * (D + 2) + D + 1, last.to(dt), mask=i < rows)


@triton.jit
def mix_gradients_kernel(
    x, taps, dout, dx, dtaps, rows, D: tl.constexpr, LAST: tl.constexpr, BR: tl.constexpr, DP: tl.constexpr
):
    """dtaps [blocks,3] float32."""
    i = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    d = tl.arange(0, DP)
    w0, w1, w2 = tl.load(taps).to(tl.float32), tl.load(taps + 1).to(tl.float32), tl.load(taps + 2).to(tl.float32)
    dy = load_row(dout, i, d, rows, D, D + 2) * (d < D)[None, :]
    first = load_column(dout, i, D, rows, D + 2)
    last = load_column(dout, i, D + 1, rows, D + 2)
    y = w1 * dy + w0 * load_row(dout, i, d + 1, rows, D, D + 2) + w2 * load_row(dout, i, d - 1, rows, D, D + 2)
    y += first[:, None] * (tl.where(d == 0, w1, 0.0) + tl.where(d == 1 % D, w2, 0.0))[None, :]
    y += last[:, None] * (tl.where(d == (LAST - 1) % D, w0, 0.0) + tl.where(d == LAST % D, w1, 0.0))[None, :]
    tl.store(dx + i[:, None] * D + d[None, :], y.to(dx.dtype.element_ty), mask=(i < rows)[:, None] & (d < D)[None, :])
    d0 = tl.sum(dy * load_row(x, i, d - 1, rows, D, D)) + tl.sum(last * load_column(x, i, (LAST - 1) % D, rows, D))
    d1 = tl.sum(dy * load_row(x, i, d, rows, D, D)) + tl.sum(last * load_column(x, i, LAST % D, rows, D))
    d1 += tl.sum(first * load_column(x, i, 0, rows, D))
    d2 = tl.sum(dy * load_row(x, i, d + 1, rows, D, D)) + tl.sum(first * load_column(x, i, 1 % D, rows, D))
    dtaps += tl.program_id(0).to(tl.int64) * 3
    tl.store(dtaps, d0)
    tl.store(dtaps + 1, d1)
    tl.store(dtaps + 2, d2)


@triton.jit
def column(c, D: tl.constexpr, X: tl.constexpr, F: tl.constexpr):
    """Of x, for channels c."""
    at = c % D
    if X > D:
        at = tl.where(c == 0, D, tl.where(c == F - 1, D + 1, at))
    return at


@triton.jit
def earlier(here, at, real, s, X: tl.constexpr):
    """Columns of x, s tokens before [BT,W], in float32."""
    x, _, t, age, inside = here
    there = inside & (age >= s)
    return tl.load(x + (t - s)[:, None] * X + at[None, :], mask=there[:, None] & real[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def convolved(here, c, real, D: tl.constexpr, X: tl.constexpr, F: tl.constexpr, SIZE: tl.constexpr):
    """Channels c after the short convolution [BT,W]."""
    at = column(c, D, X, F)
    y = tl.zeros([here[2].shape[0], c.shape[0]], tl.float32)
    for s in tl.static_range(SIZE):
        tap = tl.load(here[1] + c * SIZE + (SIZE - 1 - s), mask=real, other=0.0).to(tl.float32)
        y += earlier(here, at, real, s, X) * tap[None, :]
    return y


@triton.jit
def channel(here, c, D: tl.constexpr, X: tl.constexpr, F: tl.constexpr, SIZE: tl.constexpr):
    """One channel after the short convolution [BT]."""
    one = tl.arange(0, 1)
    return tl.sum(convolved(here, c + one, one == 0, D, X, F, SIZE), 1)


@triton.jit
def unit(x):
    """1/|x| of each row, where a row may be zero."""
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["T"])
def front_kernel(
    x,  # [B,EXTRA+T,X]
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
    X: tl.constexpr,
    F: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,  # tokens before the first, of which x has rows and nothing is asked
    PACKED: tl.constexpr,
):
    b, t, inside, age = tokens(position, T, BT, EXTRA, PACKED)
    h = tl.program_id(1)
    row = b * T + t
    x += (b * (T + EXTRA) + EXTRA) * X
    here = (x, conv, t, age, inside)
    kept = tl.full([BT], 1.0, tl.float32)
    if mask is not None:
        kept = tl.load(mask + row, mask=inside, other=0).to(tl.float32)
    dt = values.dtype.element_ty
    N: tl.constexpr = len(KEY_DIMS)
    w = tl.arange(0, KP)
    for i in tl.static_range(N):
        real = w < KEY_DIMS[i]
        c = h * KEY_DIMS[i] + w
        q = convolved(here, STARTS[2 * i] + c, real, D, X, F, SIZE)
        k = convolved(here, STARTS[2 * i + 1] + c, real, D, X, F, SIZE)
        q *= tl.sigmoid(q)
        k *= tl.sigmoid(k)
        q *= unit(q)[:, None]
        k *= unit(k)[:, None]
        at = (row * H + h) * (KEY_DIMS[i] + SKIP)
        if SKIP:  # [1 - ξ, ξq] and [1, k], of length one
            xi = tl.sigmoid(channel(here, STARTS[2 * N + 3 + i] + h, D, X, F, SIZE))
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
    v = convolved(here, STARTS[2 * N] + h * V + o, real, D, X, F, SIZE)
    v *= tl.sigmoid(v)
    if forget is not None:
        g = log_sigmoid(channel(here, STARTS[2 * N + 1] + h, D, X, F, SIZE)) / TAU
        if TELESCOPING:
            v *= tl.exp(-g)[:, None]
            tl.store(forget + row * H + h, tl.exp(g), mask=inside)
        else:
            tl.store(forget + row * H + h, g * kept, mask=inside)
    tl.store(values + into, v.to(dt), mask=both)
    if beta is not None:
        y = tl.sigmoid(channel(here, STARTS[2 * N + 2] + h, D, X, F, SIZE))
        tl.store(beta + row * H + h, y.to(dt), mask=inside)
    c = STARTS[len(STARTS) - 1] + h * V + o
    if GATE_CONV:
        y = convolved(here, c, real, D, X, F, SIZE)
    else:
        y = earlier(here, column(c, D, X, F), real, 0, X)
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
    X: tl.constexpr,
    F: tl.constexpr,
    SIZE: tl.constexpr,
    CONV: tl.constexpr,
):
    """Writes the gradient of channels c after the convolution, and the block's part of those of its weights."""
    inside = here[4]
    at = dfused + row[:, None] * F + c[None, :]
    tl.store(at, dy.to(dfused.dtype.element_ty), mask=inside[:, None] & real[None, :])
    if CONV:
        at = column(c, D, X, F)
        for s in tl.static_range(SIZE):
            part = tl.sum(dy * earlier(here, at, real, s, X), 0)
            tl.store(dconv + c * SIZE + (SIZE - 1 - s), part, mask=real)


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
    dconv,  # [blocks,C,SIZE] float32
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
    BT: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,  # tokens before the first, of which x has rows and nothing is asked
    PACKED: tl.constexpr,
):
    b, t, inside, age = tokens(position, T, BT, EXTRA, PACKED)
    h = tl.program_id(1)
    row = b * T + t
    x += (b * (T + EXTRA) + EXTRA) * X
    here = (x, conv, t, age, inside)
    block = tl.program_id(0).to(tl.int64)
    dconv += block * (C * SIZE)
    kept = tl.full([BT], 1.0, tl.float32)
    if mask is not None:
        kept = tl.load(mask + row, mask=inside, other=0).to(tl.float32)
    N: tl.constexpr = len(KEY_DIMS)
    w = tl.arange(0, KP)
    one = tl.arange(0, 1)
    sole = one == 0
    for i in tl.static_range(N):
        real = w < KEY_DIMS[i]
        at = (row * H + h) * (KEY_DIMS[i] + SKIP)
        into = (at + SKIP)[:, None] + w[None, :]
        both = inside[:, None] & real[None, :]

        c = STARTS[2 * i] + h * KEY_DIMS[i] + w
        y = convolved(here, c, real, D, X, F, SIZE)
        a = y * tl.sigmoid(y)
        norm = unit(a)
        d = tl.load(dqueries[i] + into, mask=both, other=0.0).to(tl.float32)
        if SKIP:
            q = a * norm[:, None]
            z = channel(here, STARTS[2 * N + 3 + i] + h, D, X, F, SIZE)
            xi = tl.sigmoid(z)
            e = xi[:, None] * q
            r = tl.rsqrt(tl.sum(e * e, 1) + (1.0 - xi) * (1.0 - xi) + EPS)
            d0 = tl.load(dqueries[i] + at, mask=inside, other=0.0).to(tl.float32)
            dot = tl.sum(d * e, 1) + d0 * (1.0 - xi)
            d = r[:, None] * (d - e * (r * r * dot)[:, None])
            d0 = r * (d0 - (1.0 - xi) * r * r * dot)
            dz = (tl.sum(d * q, 1) - d0) * xi * (1.0 - xi)
            leave(
                dz[:, None],
                here,
                dfused,
                dconv,
                row,
                STARTS[2 * N + 3 + i] + h + one,
                sole,
                D,
                X,
                F,
                SIZE,
                True,
            )
            d *= xi[:, None]
        d = silu_gradient(unit_gradient(d, a, norm), y)
        leave(d, here, dfused, dconv, row, c, real, D, X, F, SIZE, True)

        c = STARTS[2 * i + 1] + h * KEY_DIMS[i] + w
        y = convolved(here, c, real, D, X, F, SIZE)
        a = y * tl.sigmoid(y)
        norm = unit(a)
        d = tl.load(dkeys[i] + into, mask=both, other=0.0).to(tl.float32) * kept[:, None]
        if SKIP:
            k = a * norm[:, None]
            r = tl.rsqrt(tl.sum(k * k, 1) + 1.0 + EPS)
            dot = tl.sum(d * k, 1) + tl.load(dkeys[i] + at, mask=inside, other=0.0).to(tl.float32) * kept
            d = r[:, None] * (d - k * (r * r * dot)[:, None])
        d = silu_gradient(unit_gradient(d, a, norm), y)
        leave(d, here, dfused, dconv, row, c, real, D, X, F, SIZE, True)

    o = tl.arange(0, VP)
    real = o < V
    into = ((row * H + h) * V)[:, None] + o[None, :]
    both = inside[:, None] & real[None, :]
    c = STARTS[2 * N] + h * V + o
    y = convolved(here, c, real, D, X, F, SIZE)
    d = tl.load(dvalues + into, mask=both, other=0.0).to(tl.float32)
    da = tl.zeros([BT], tl.float32)
    if dforget is not None:
        z = channel(here, STARTS[2 * N + 1] + h, D, X, F, SIZE)
        g = log_sigmoid(z) / TAU
        dg = tl.load(dforget + row * H + h, mask=inside, other=0.0)
        if TELESCOPING:
            d *= tl.exp(-g)[:, None]
            dg = dg * tl.exp(g) - tl.sum(d * y * tl.sigmoid(y), 1)
        else:
            dg *= kept
        da = dg * tl.sigmoid(-z) / TAU
    leave(da[:, None], here, dfused, dconv, row, STARTS[2 * N + 1] + h + one, sole, D, X, F, SIZE, True)
    d = silu_gradient(d, y)
    leave(d, here, dfused, dconv, row, c, real, D, X, F, SIZE, True)
    db = tl.zeros([BT], tl.float32)
    if dbeta is not None:
        y = tl.sigmoid(channel(here, STARTS[2 * N + 2] + h, D, X, F, SIZE))
        db = tl.load(dbeta + row * H + h, mask=inside, other=0.0).to(tl.float32) * y * (1.0 - y)
    leave(db[:, None], here, dfused, dconv, row, STARTS[2 * N + 2] + h + one, sole, D, X, F, SIZE, True)
    if not SKIP:  # channels that nothing reads
        for i in tl.static_range(len(STARTS) - 2 * N - 4):
            leave(
                db[:, None] * 0.0,
                here,
                dfused,
                dconv,
                row,
                STARTS[2 * N + 3 + i] + h + one,
                sole,
                D,
                X,
                F,
                SIZE,
                True,
            )
    d = tl.load(dgate + into, mask=both, other=0.0).to(tl.float32)
    c = STARTS[len(STARTS) - 1] + h * V + o
    leave(d, here, dfused, dconv, row, c, real, D, X, F, SIZE, GATE_CONV)


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
    conv,
    position,
    dx,  # [B,T,X]
    T,
    D: tl.constexpr,
    X: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    PACKED: tl.constexpr,
):
    b, t, inside, _ = tokens(position, T, BT, 0, PACKED)
    dfused += b * T * F
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    y = tl.zeros([BT, BD], tl.float32)
    for start in range(0, F, D):  # each copy of x
        c = start + d
        real = (d < D) & (c < F)
        if X > D:
            real = real & (c > 0) & (c < F - 1)
        y += unconvolved(dfused, conv, t, T, position, c, real, F, C, SIZE, PACKED)
    if X > D:
        c = tl.where(d == D, 0, F - 1)
        y += unconvolved(dfused, conv, t, T, position, c, (d == D) | (d == D + 1), F, C, SIZE, PACKED)
    at = (b * T + t)[:, None] * X + d[None, :]
    tl.store(dx + at, y.to(dx.dtype.element_ty), mask=inside[:, None] & (d < X)[None, :])


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
