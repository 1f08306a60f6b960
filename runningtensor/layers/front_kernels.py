"""The front end of the layer as Triton kernels: what running_tensor.py computes in a dozen passes.

`front_kernel` reads what a projection's `compact` gives, repeats channels, convolves them over time and forms queries,
keys, values and gates; nothing as wide as the projection is written. Backward, `front_gradients_kernel` does that again
and goes back through the convolution, and `input_gradients_kernel` adds up the copies of each channel.

A program of the two has R rows; a row is a head and walks through SPAN tokens, forward or back, with the tokens that
the convolution needs in registers, so that each is read once. Its channels lie in N pieces of W lanes, and a gate that
goes with them in one more, the same in all lanes: sums over a head then stay within a few threads, and all of them
know the gate. Sums over tokens are left in one row for each span, to be added in one order.

x [·,X] is the compact form: channel c of d_fused is column c % D, but for the first and the last,
which have columns of their own where channels are mixed (X = D + 2), for there the mixing ends.
"""

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # of norms.l2_normalize
TAU = tl.constexpr(16.0)


@triton.constexpr_function
def lanes(width):
    """Of a piece: at most four pieces, and not much padding."""
    return min(max(8, triton.next_power_of_2(width) // 4), 128)


@triton.constexpr_function
def widest(widths):
    return max(widths)


@triton.jit
def rows_of(B, T, H: tl.constexpr, EXTRA: tl.constexpr, SPAN: tl.constexpr, R: tl.constexpr):
    """Of this program's rows [R,1]: heads, first tokens, which are there, and where these tokens are: one large number
    for the program and a small one for each row, first where EXTRA tokens precede each sequence, then where none do."""
    i = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    spans = tl.cdiv(T, SPAN)
    first = tl.program_id(0) * R // H
    b0, t0 = first // spans, first % spans * SPAN
    b, t = i // H // spans, i // H % spans * SPAN
    row = (b - b0) * T + t - t0
    large = b0.to(tl.int64)
    return i % H, t, b < B, large * (T + EXTRA) + EXTRA + t0, row + (b - b0) * EXTRA, large * T + t0, row


@triton.jit
def channels(start, gate, h, width, N: tl.constexpr, W: tl.constexpr, GATED: tl.constexpr):
    """In pieces [R,W], and which are there."""
    w = tl.arange(0, W)[None, :]
    found, real = (), ()
    for j in tl.static_range(N):
        found += (start + h * width + j * W + w,)
        real += (j * W + w < width,)
    if GATED:
        found += (gate + h + w * 0,)
        real += (w >= 0,)
    return found, real


@triton.jit
def taps_of(conv, c, real, bare, N: tl.constexpr, SIZE: tl.constexpr):
    """Weights of the convolution: of each piece, and in it from the oldest token to the newest. If bare, the pieces
    are not convolved, but for the gate."""
    found = ()
    for j in tl.static_range(len(c)):
        for i in tl.static_range(SIZE):
            y = tl.load(conv + c[j] * SIZE + i, mask=real[j] & ((j >= N) | ~bare), other=0.0).to(tl.float32)
            if j < N and i == SIZE - 1:
                y = tl.where(real[j] & bare, 1.0, y)
            found += (y,)
    return found


@triton.jit
def columns(c, D: tl.constexpr, X: tl.constexpr, F: tl.constexpr):
    """Of x."""
    found = ()
    for j in tl.static_range(len(c)):
        at = c[j] % D
        if X > D:
            at = tl.where(c[j] == 0, D, tl.where(c[j] == F - 1, D + 1, at))
        found += (at,)
    return found


@triton.jit
def token(x, at, row, t, s, there, T, X: tl.constexpr, EXTRA: tl.constexpr):
    """Columns of token t + s of each row; zeros before and after its sequence."""
    there = there & (t + s >= -EXTRA) & (t + s < T)
    found = ()
    for j in tl.static_range(len(at)):
        found += (tl.load(x + ((row + s) * X + at[j]), mask=there, other=0.0).to(tl.float32),)
    return found


@triton.jit
def window(x, at, row, t, s, there, T, X: tl.constexpr, EXTRA: tl.constexpr, SIZE: tl.constexpr):
    """Of each piece, the SIZE tokens up to t + s, the oldest first."""
    tokens = ()
    for i in tl.static_range(SIZE):
        tokens += (token(x, at, row, t, s + (i - SIZE + 1), there, T, X, EXTRA),)
    found = ()
    for j in tl.static_range(len(at)):
        for i in tl.static_range(SIZE):
            found += (tokens[i][j],)
    return found


@triton.jit
def convolved(seen, taps, age, SIZE: tl.constexpr, PACKED: tl.constexpr):
    found = ()
    for j in tl.static_range(len(seen) // SIZE):
        y = seen[j * SIZE + SIZE - 1] * taps[j * SIZE + SIZE - 1]
        for s in tl.static_range(SIZE - 1):
            x = seen[j * SIZE + s]
            if PACKED:
                x = tl.where(age >= SIZE - 1 - s, x, 0.0)
            y += x * taps[j * SIZE + s]
        found += (y,)
    return found


@triton.jit
def silu(y, N: tl.constexpr):
    """Of the first N pieces."""
    found = ()
    for j in tl.static_range(N):
        found += (y[j] * tl.sigmoid(y[j]),)
    return found


@triton.jit
def dot(a, b, N: tl.constexpr):
    """Of each row [R,1]."""
    y = a[0] * b[0]
    for j in tl.static_range(1, N):
        y += a[j] * b[j]
    return tl.sum(y, 1)[:, None]


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def walk(
    VALUES: tl.constexpr,  # values and output gates, or else queries and keys
    WIDEST: tl.constexpr,
    role,
    forget,
    beta,
    given,
    SHAPE: tl.constexpr,
    GATED: tl.constexpr,
    SLOT: tl.constexpr,
    TELESCOPING: tl.constexpr,
):
    second, width, start, gate, bare, out = role
    x, conv, position, mask, B, T = given
    H: tl.constexpr = SHAPE[0]
    D: tl.constexpr = SHAPE[1]
    X: tl.constexpr = SHAPE[2]
    F: tl.constexpr = SHAPE[3]
    SIZE: tl.constexpr = SHAPE[4]
    SPAN: tl.constexpr = SHAPE[5]
    LANES: tl.constexpr = SHAPE[6]
    EXTRA: tl.constexpr = SHAPE[7]
    PACKED: tl.constexpr = SHAPE[8]
    W: tl.constexpr = lanes(WIDEST)
    N: tl.constexpr = (WIDEST + W - 1) // W
    R: tl.constexpr = LANES // W
    h, t, there, first_source, source, first, row = rows_of(B, T, H, EXTRA, SPAN, R)
    w = tl.arange(0, W)[None, :]
    sole = w == 0
    c, real = channels(start, gate, h, width, N, W, GATED)
    taps = taps_of(conv, c, real, bare, N, SIZE)
    at = columns(c, D, X, F)
    x += first_source * X
    seen = window(x, at, source, t, 0, there, T, X, EXTRA, SIZE)
    out += first * (H * (width + SLOT))
    steps = tl.where(tl.program_id(0) * R < B * tl.cdiv(T, SPAN) * H, SPAN, 0)  # wide heads have more programs
    for s in range(steps):
        inside = there & (t + s < T)
        after = token(x, at, source, t, s + 1, there, T, X, EXTRA)
        age = t + s
        if PACKED:
            age = tl.load(position + (age + w * 0), mask=inside, other=0).to(tl.int32)
        kept = tl.full([1, W], 1.0, tl.float32)
        if mask is not None:
            kept = tl.load(mask + first + (row + s + w * 0), mask=inside, other=0).to(tl.float32)
        y = convolved(seen, taps, age, SIZE, PACKED)
        z = y[len(y) - 1]
        place = tl.where(there, (row + s) * H + h, 0)  # else heads would go to neighbouring lanes, by way of memory
        dt = out.dtype.element_ty
        if VALUES:
            scale = tl.full([1, W], 1.0, tl.float32)
            if forget is not None:
                g = log_sigmoid(z) / TAU
                if TELESCOPING:
                    scale = tl.where(second, 1.0, tl.exp(-g))
                    g = tl.exp(g)
                else:
                    g *= kept
                tl.store(forget + first * H + (place + w * 0), g, mask=inside & sole & ~second)
            if beta is not None:
                y1 = tl.sigmoid(z).to(dt)
                tl.store(beta + first * H + (place + w * 0), y1, mask=inside & sole & second)
            act = ()
            for j in tl.static_range(N):
                act += (tl.where(second, y[j], y[j] * tl.sigmoid(y[j])),)
        else:
            act = silu(y, N)
            length = dot(act, act, N)
            scale = tl.rsqrt(length + EPS)
            if SLOT == 1:  # [1 - ξ, ξq] or [1, k], of length one
                xi = tl.where(second, 1.0, tl.sigmoid(z))
                one = tl.where(second, 1.0, 1.0 - xi)
                scale *= xi
                norm = tl.rsqrt(length * scale * scale + one * one + EPS) * tl.where(second, kept, 1.0)
                scale *= norm
                tl.store(out + (place * (width + 1) + w * 0), (one * norm).to(dt), mask=inside & sole)
            else:
                scale *= tl.where(second, kept, 1.0)
        into = place * (width + SLOT) + SLOT + w
        for j in tl.static_range(N):
            tl.store(out + (into + j * W), (act[j] * scale).to(dt), mask=inside & real[j])
        now = ()
        for j in tl.static_range(len(at)):
            now = now + seen[j * SIZE + 1 : (j + 1) * SIZE] + (after[j],)
        seen = now


@triton.jit
def key_role(part, queries, keys, KEY_DIMS: tl.constexpr, STARTS: tl.constexpr):
    """Of the queries or keys that a program is for: whether they are keys, their width, their first channel and that
    of their gate, if the convolution leaves them out, and where they are."""
    M: tl.constexpr = len(KEY_DIMS)
    second = part % 2 == 1
    width, start, gate, at = KEY_DIMS[0], 0, 0, queries[0]
    for i in tl.static_range(M):
        here = part // 2 == i
        width = tl.where(here, KEY_DIMS[i], width)
        gate = tl.where(here, STARTS[len(STARTS) - 1 - M + i], gate)
        start = tl.where(here, tl.where(second, STARTS[2 * i + 1], STARTS[2 * i]), start)
        if here:
            at = queries[i]
            if second:
                at = keys[i]
    return second, width, start, gate, part < 0, at


@triton.jit
def value_role(
    part, values, gates, V: tl.constexpr, STARTS: tl.constexpr, M: tl.constexpr, H: tl.constexpr, CONV: tl.constexpr
):
    """The same of the values or output gates. Their gates are those of forgetting and β, which follow each other."""
    second = part == M + 1
    at = values
    if second:
        at = gates
    start = tl.where(second, STARTS[len(STARTS) - 1], STARTS[M])
    return second, V, start, STARTS[M + 1] + (part - M) * H, second & (CONV == 0), at


@triton.jit(do_not_specialize=["B", "T"])
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
    B,
    T,
    KEY_DIMS: tl.constexpr,
    STARTS: tl.constexpr,  # channels at which q, k, u, r, v, a, b, z1, z2 and g_out begin
    V: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    F: tl.constexpr,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
    EXTRA: tl.constexpr,  # tokens before the first, of which x has rows and nothing is asked
    PACKED: tl.constexpr,
):
    given = (x, conv, position, mask, B, T)
    M: tl.constexpr = 2 * len(KEY_DIMS)
    SHAPE: tl.constexpr = (H, D, X, F, SIZE, SPAN, LANES, EXTRA, PACKED)
    part = tl.program_id(1)
    if part < M:
        role = key_role(part, queries, keys, KEY_DIMS, STARTS)
        walk(False, widest(KEY_DIMS), role, None, None, given, SHAPE, SKIP, SKIP, TELESCOPING)
    else:
        role = value_role(part, values, gate, V, STARTS, M, H, GATE_CONV)
        walk(True, V, role, forget, beta, given, SHAPE, True, 0, TELESCOPING)


@triton.jit
def silu_gradient(dy, x):
    """Of SiLU at x, given that of SiLU(x)."""
    s = tl.sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))


@triton.jit
def walk_back(
    VALUES: tl.constexpr,
    WIDEST: tl.constexpr,
    role,
    dforget,
    dbeta,
    given,
    SHAPE: tl.constexpr,
    GATED: tl.constexpr,
    SLOT: tl.constexpr,
    TELESCOPING: tl.constexpr,
):
    """From the last token to the first. The tokens just after the span are walked through too: the convolution takes
    their gradients to tokens within it."""
    second, width, start, gate, bare, dout = role
    x, conv, position, mask, dfused, dconv, B, T = given
    H: tl.constexpr = SHAPE[0]
    D: tl.constexpr = SHAPE[1]
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
    h, t, there, first_source, source, first, row = rows_of(B, T, H, EXTRA, SPAN, R)
    w = tl.arange(0, W)[None, :]
    c, real = channels(start, gate, h, width, N, W, GATED)
    taps = taps_of(conv, c, real, bare, N, SIZE)
    at = columns(c, D, X, F)
    if GATED:  # once, and not at all for keys or where there is no such gate
        mine = (w == 0) & ~second
        if VALUES:
            mine = (w == 0) & tl.where(second, dbeta is not None, dforget is not None)
        real = real[:N] + (mine,)
    x += first_source * X
    seen = window(x, at, source, t, LAST, there, T, X, EXTRA, SIZE)
    dout += first * (H * (width + SLOT))
    dfused += first * F
    nothing = tl.zeros([R, W], tl.float32)
    pending = (nothing,) * (len(at) * (SIZE - 1))  # gradients of tokens before, as far as they are known
    dtaps = (nothing,) * (len(at) * SIZE)
    steps = tl.where(tl.program_id(0) * R < B * tl.cdiv(T, SPAN) * H, SPAN + SIZE - 1, 0)
    for i in range(steps):
        s = LAST - i
        inside = there & (t + s < T)
        own = inside & (s < SPAN)
        before = token(x, at, source, t, s - SIZE, there, T, X, EXTRA)
        age = t + s
        if PACKED:
            age = tl.load(position + (age + w * 0), mask=inside, other=0).to(tl.int32)
        kept = tl.full([1, W], 1.0, tl.float32)
        if mask is not None:
            kept = tl.load(mask + first + (row + s + w * 0), mask=inside, other=0).to(tl.float32)
        place = tl.where(there, (row + s) * H + h, 0)  # else heads would go to neighbouring lanes, by way of memory
        into = place * (width + SLOT) + SLOT + w
        d = ()
        for j in tl.static_range(N):
            d += (tl.load(dout + (into + j * W), mask=inside & real[j], other=0.0).to(tl.float32),)
        y = convolved(seen, taps, age, SIZE, PACKED)
        z = y[len(y) - 1]
        act = silu(y, N)
        dy = ()
        if VALUES:
            scale = tl.full([1, W], 1.0, tl.float32)
            dz = tl.zeros([1, W], tl.float32)
            if dforget is not None:
                g = log_sigmoid(z) / TAU
                dg = tl.load(dforget + first * H + (place + w * 0), mask=inside & ~second, other=0.0)
                if TELESCOPING:
                    scale = tl.exp(-g)
                    dg = dg * tl.exp(g) - scale * dot(act, d, N)
                else:
                    dg *= kept
                dz = dg * tl.sigmoid(-z) / TAU
            if dbeta is not None:
                db = tl.load(dbeta + first * H + (place + w * 0), mask=inside & second, other=0.0)
                beta = tl.sigmoid(z)
                dz = tl.where(second, db.to(tl.float32) * beta * (1.0 - beta), dz)
            for j in tl.static_range(N):
                dy += (tl.where(second, d[j], silu_gradient(scale * d[j], y[j])),)
            dy += (dz,)
        else:
            kept = tl.where(second, kept, 1.0)
            length = dot(act, act, N)
            norm = tl.rsqrt(length + EPS)
            along = dot(act, d, N) * norm * kept
            scale = kept
            aside = along
            if SLOT == 1:
                d0 = tl.load(dout + (place * (width + 1) + w * 0), mask=inside, other=0.0).to(tl.float32) * kept
                xi = tl.where(second, 1.0, tl.sigmoid(z))
                one = tl.where(second, 1.0, 1.0 - xi)
                length *= norm * norm
                r = tl.rsqrt(length * xi * xi + one * one + EPS)
                total = (xi * along + one * d0) * r * r
                along = r * (along - xi * length * total)
                dz = (along - r * (d0 - one * total)) * xi * one
                scale = xi * r * kept
                aside = xi * (xi * r * total + along)
            for j in tl.static_range(N):
                dy += (silu_gradient(norm * (scale * d[j] - aside * norm * act[j]), y[j]),)
            if SLOT == 1:
                dy += (dz,)
        known, sums, now = (), (), ()
        for j in tl.static_range(len(at)):
            full = taps[j * SIZE + SIZE - 1] * dy[j]
            if SIZE > 1:
                full += pending[j * (SIZE - 1)]
            tl.store(dfused + ((row + s) * F + c[j]), full.to(dfused.dtype.element_ty), mask=own & real[j])
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
            written = there & real[j] & ((j >= N) | ~bare)
            tl.store(dconv + c[j] * SIZE + k, dtaps[j * SIZE + k], mask=written)


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
    given = (x, conv, position, mask, dfused, dconv, B, T)
    M: tl.constexpr = 2 * len(KEY_DIMS)
    SHAPE: tl.constexpr = (H, D, X, F, SIZE, SPAN, LANES, EXTRA, PACKED, C)
    part = tl.program_id(1)
    if part < M:
        role = key_role(part, dqueries, dkeys, KEY_DIMS, STARTS)
        walk_back(False, widest(KEY_DIMS), role, None, None, given, SHAPE, SKIP, SKIP, TELESCOPING)
    else:
        role = value_role(part, dvalues, dgate, V, STARTS, M, H, GATE_CONV)
        walk_back(True, V, role, dforget, dbeta, given, SHAPE, True, 0, TELESCOPING)


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
