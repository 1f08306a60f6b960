"""The front end of the layer as Triton kernels: what running_tensor.py computes in a dozen passes.

`front_kernel` reads what a projection's `compact` gives, repeats channels, convolves them over time and forms queries,
keys, values and gates; nothing as wide as the projection is written. front_gradients.py is the way back.

A program has R rows; a row is a head and walks through SPAN tokens, forward or back, with the tokens that
the convolution needs in registers, so that each is read once. Its channels lie in N pieces of W lanes, and a gate that
goes with them in one more, the same in all lanes: sums over a head then stay within a few threads, and all of them
know the gate. Sums over tokens are left in one row for each span, to be added in one order.

x [·,X] is the compact form: channel c of d_fused is column c % D, but for the first and the last,
which have columns of their own where channels are mixed (X = D + 2), for there the mixing ends.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
EPS = tl.constexpr(1e-6)  # of norms.l2_normalize
TAU = tl.constexpr(16.0)
# What a program makes; each kind is compiled by itself, and has nothing of the others to do.
QUERIES, KEYS, VALUES, GATES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.constexpr_function
def lanes(width):
    """Of a piece: at most four pieces, and not much padding."""
    return min(max(4, triton.next_power_of_2(width) // 4), 128)


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
    if GATED:  # not known to be in a row, else heads would go to neighbouring lanes, by way of memory
        found += (gate + tl.where(h < 0, 0, h) + w * 0,)
        real += (w >= 0,)
    return found, real


@triton.jit
def taps_of(conv, c, real, N: tl.constexpr, SIZE: tl.constexpr, BARE: tl.constexpr):
    """Weights of the convolution: of each piece, and in it from the oldest token to the newest. If bare, the pieces
    are not convolved, but for the gate."""
    found = ()
    for j in tl.static_range(len(c)):
        for i in tl.static_range(SIZE):
            if BARE and j < N:
                y = tl.where(real[j], 1.0 if i == SIZE - 1 else 0.0, 0.0)
            else:
                y = tl.load(conv + c[j] * SIZE + i, mask=real[j], other=0.0).to(tl.float32)
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
        found += (tl.load(x + (row + s) * X + at[j], mask=there, other=0.0).to(tl.float32),)
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
def sigmoid(x):
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-x))
    # The same without detours for subnormal numbers, which 1 + exp(-x) is never near.
    short: tl.constexpr = """{
        .reg .f32 y;
        mul.ftz.f32 y, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 y, y;
        add.ftz.f32 y, y, 0f3F800000;
        rcp.approx.ftz.f32 $0, y;
    }"""
    return tl.inline_asm_elementwise(short, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def silu(y, N: tl.constexpr):
    """Of the first N pieces."""
    found = ()
    for j in tl.static_range(N):
        found += (y[j] * sigmoid(y[j]),)
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
def begin(
    role, x, conv, B, T, SHAPE: tl.constexpr, GATED: tl.constexpr, BARE: tl.constexpr, W: tl.constexpr, N: tl.constexpr
):
    """What a walk knows before its first token: `rows_of`, x and where its tokens are, and its channels, their taps and
    columns."""
    width, start, gate, _ = role
    H: tl.constexpr = SHAPE[0]
    D: tl.constexpr = SHAPE[1]
    X: tl.constexpr = SHAPE[2]
    F: tl.constexpr = SHAPE[3]
    EXTRA: tl.constexpr = SHAPE[7]
    h, t, there, first_source, source, first, row = rows_of(B, T, H, EXTRA, SHAPE[5], SHAPE[6] // W)
    c, real = channels(start, gate, h, width, N, W, GATED)
    taps = taps_of(conv, c, real, N, SHAPE[4], BARE)
    return h, t, there, x + first_source * X, source, first, row, c, real, taps, columns(c, D, X, F)


@triton.jit
def standing(position, mask, t, row, inside, w, PACKED: tl.constexpr):
    """How many tokens of its sequence come before each token, as far as it matters, and 0 where it is masked."""
    age = t
    if PACKED:
        age = tl.load(position + (t + w * 0), mask=inside, other=0).to(tl.int32)
    kept = w * 0.0 + 1.0
    if mask is not None:
        kept = tl.load(mask + (row + w * 0), mask=inside, other=0).to(tl.float32)
    return age, kept


@triton.jit
def walk(
    KIND: tl.constexpr,
    WIDEST: tl.constexpr,
    role,
    gone,  # what the gate that goes with values or output gates becomes
    given,
    SHAPE: tl.constexpr,
    GATED: tl.constexpr,
    BARE: tl.constexpr,
    SLOT: tl.constexpr,
    TELESCOPING: tl.constexpr,
):
    width, _, _, out = role
    x, conv, position, mask, B, T = given
    H: tl.constexpr = SHAPE[0]
    X: tl.constexpr = SHAPE[2]
    SIZE: tl.constexpr = SHAPE[4]
    SPAN: tl.constexpr = SHAPE[5]
    LANES: tl.constexpr = SHAPE[6]
    EXTRA: tl.constexpr = SHAPE[7]
    PACKED: tl.constexpr = SHAPE[8]
    W: tl.constexpr = lanes(WIDEST)
    N: tl.constexpr = (WIDEST + W - 1) // W
    R: tl.constexpr = LANES // W
    w = tl.arange(0, W)[None, :]
    sole = w == 0
    h, t, there, x, source, first, row, _, real, taps, at = begin(role, x, conv, B, T, SHAPE, GATED, BARE, W, N)
    if mask is not None:
        mask += first
    seen = window(x, at, source, t, 0, there, T, X, EXTRA, SIZE)
    out += first * (H * (width + SLOT))
    steps = tl.where(tl.program_id(0) * R < B * tl.cdiv(T, SPAN) * H, SPAN, 0)  # wide heads have more programs
    for s in range(steps):
        inside = there & (t + s < T)
        after = token(x, at, source, t, s + 1, there, T, X, EXTRA)
        age, kept = standing(position, mask, t + s, row + s, inside, w, PACKED)
        y = convolved(seen, taps, age, SIZE, PACKED)
        z = y[len(y) - 1]
        place = tl.where(there, (row + s) * H + h, 0)  # else heads would go to neighbouring lanes, by way of memory
        dt = out.dtype.element_ty
        act = y
        if KIND != GATES:
            act = silu(y, N)
        scale = tl.full([1, W], 1.0, tl.float32)
        if KIND == VALUES and GATED:
            g = log_sigmoid(z) / TAU
            if TELESCOPING:
                scale = tl.exp(-g)
                g = tl.exp(g)
            else:
                g *= kept
            tl.store(gone + first * H + (place + w * 0), g, mask=inside & sole)
        if KIND == GATES and GATED:
            tl.store(gone + first * H + (place + w * 0), sigmoid(z).to(dt), mask=inside & sole)
        if KIND < VALUES:
            length = dot(act, act, N)
            scale = tl.rsqrt(length + EPS)
            if SLOT == 1:  # [1 - ξ, ξq] or [1, k], of length one
                one = scale * 0.0 + 1.0
                if KIND == QUERIES:
                    xi = sigmoid(z)
                    one = 1.0 - xi
                    scale *= xi
                norm = tl.rsqrt(length * scale * scale + one * one + EPS)
                if KIND == KEYS:
                    norm *= kept
                scale *= norm
                tl.store(out + (place * (width + 1) + w * 0), (one * norm).to(dt), mask=inside & sole)
            elif KIND == KEYS:
                scale *= kept
        into = out + (place * (width + SLOT) + SLOT + w)
        for j in tl.static_range(N):
            tl.store(into + j * W, (act[j] * scale).to(dt), mask=inside & real[j])
        now = ()
        for j in tl.static_range(len(at)):
            now = now + seen[j * SIZE + 1 : (j + 1) * SIZE] + (after[j],)
        seen = now


@triton.jit
def key_role(i, tensors, SECOND: tl.constexpr, KEY_DIMS: tl.constexpr, STARTS: tl.constexpr):
    """Of the queries or, second, the keys of a mode: their width, their first channel and that of their gate, and
    where they are."""
    M: tl.constexpr = len(KEY_DIMS)
    width, start, gate, at = KEY_DIMS[0], 0, 0, tensors[0]
    for j in tl.static_range(M):
        width = tl.where(i == j, KEY_DIMS[j], width)
        gate = tl.where(i == j, STARTS[len(STARTS) - 1 - M + j], gate)
        start = tl.where(i == j, STARTS[2 * j + SECOND], start)
        if i == j:
            at = tensors[j]
    return width, start, gate, at


@triton.jit
def one_kind(
    WALK: tl.constexpr,
    given,
    made,  # queries, keys, values, β, what the forget gate gives, and output gates; or their gradients
    SHAPE: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    STARTS: tl.constexpr,
    V: tl.constexpr,
    SKIP: tl.constexpr,
    TELESCOPING: tl.constexpr,
    GATE_CONV: tl.constexpr,
):
    """Of all that is made, what this program is for: queries and keys of each mode, values, output gates."""
    queries, keys, values, beta, forget, gate = made
    M: tl.constexpr = 2 * len(KEY_DIMS)
    G: tl.constexpr = STARTS[M + 1]  # the gates of forgetting, and after them β
    part = tl.program_id(1)
    if part == M:
        role = (V, STARTS[M], G, values)
        WALK(VALUES, V, role, forget, given, SHAPE, forget is not None, False, 0, TELESCOPING)
    elif part == M + 1:
        role = (V, STARTS[len(STARTS) - 1], G + SHAPE[0], gate)
        WALK(GATES, V, role, beta, given, SHAPE, beta is not None, GATE_CONV == 0, 0, TELESCOPING)
    elif part % 2 == 0:
        role = key_role(part // 2, queries, False, KEY_DIMS, STARTS)
        WALK(QUERIES, widest(KEY_DIMS), role, None, given, SHAPE, SKIP, False, SKIP, TELESCOPING)
    else:
        role = key_role(part // 2, keys, True, KEY_DIMS, STARTS)
        WALK(KEYS, widest(KEY_DIMS), role, None, given, SHAPE, False, False, SKIP, TELESCOPING)


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
    SHAPE: tl.constexpr = (H, D, X, F, SIZE, SPAN, LANES, EXTRA, PACKED)
    given, made = (x, conv, position, mask, B, T), (queries, keys, values, beta, forget, gate)
    one_kind(walk, given, made, SHAPE, KEY_DIMS, STARTS, V, SKIP, TELESCOPING, GATE_CONV)


@triton.jit
def silu_gradient(dy, x):
    """Of SiLU at x, given that of SiLU(x)."""
    s = sigmoid(x)
    return dy * s * (1.0 + x * (1.0 - s))
