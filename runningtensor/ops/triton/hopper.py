"""What the kernels for Hopper GPUs share: how κ and φ are formed in the operand registers of `wgmma`, and the state.

Features are taken 16 at a time, a step, which is the depth of one `wgmma`. A step is a base tile (16 of the r, or twice
8, or 16 of the k) times a multiplier for each half (a k, or the last r): no products of odd widths, no padding but the
last step's, and one multiplication forms two features. For K = R = 25, with halves of 8 features:

    steps  0 to 23    r0..r15 · k_j                      base T0
    steps 24 to 36    r16..r23 · k_2p | r16..r23 · k_2p+1      base T1, p = step - 24; k25 is zero
    step  37          r0..r15 · k24                      base T0
    steps 38, 39      k0..k15 · r24, k16..k24 · r24      bases E0, E1

K = R = 24 has the first 36 of these, K = R = 16 steps 0 to 15 alone. A state is some tiles of 8 steps, and is stored so
for the backward.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from runningtensor.ops.triton.forward import sequence

# Key widths: (steps with one key, steps, tiles of 8 steps, columns of bases, rows of multipliers)
SHAPES = {(16, 16): (16, 16, 2, 16, 16), (24, 24): (24, 36, 5, 32, 32), (25, 25): (24, 40, 5, 64, 32)}

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name up to Triton 3.6
descriptor = gl.shared_memory_descriptor
reinterpret = getattr(descriptor, "reinterpret", None) or descriptor._reinterpret  # up to Triton 3.8
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # up to Triton 3.7


# A tile of κᵀ as registers hold it: [warp / 2, warp % 2, half of a step, 8 features, 64 tokens].
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 8], [0, 0, 0, 0, 16], [0, 0, 0, 0, 32]],
        [[0, 0, 0, 0, 2], [0, 0, 0, 0, 4], [0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 0, 4, 0]],
        [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0]],
        [],
        [4, 2, 2, 8, 64],
    )
)
# Its bases, which all warps share [16,64]; those of steps 38 and 39 [32,64], one a warp; its multipliers, one a
# step [8,64] or two [16,64].
BASE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[0, 0], [0, 0], [0, 0]],
        [],
        [16, 64],
    )
)
EDGES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [0, 0], [0, 0]],
        [],
        [32, 64],
    )
)
ONE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[1, 0], [2, 0], [4, 0]],
        [],
        [8, 64],
    )
)
TWO = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[2, 0], [4, 0], [8, 0]],
        [],
        [16, 64],
    )
)


@gluon.constexpr_function
def swizzled(width):
    """How shared memory holds rows of `width` 16-bit numbers for `wgmma`."""
    return gl.NVMMASharedLayout(min(2 * width, 128), 16, 2)


@gluon.constexpr_function
def pieces(width, warps):
    """16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def accumulator(rows, columns, warps):
    """Of a product of `rows` rows: the warps go along the rows, 64 for every four of them, then along the columns."""
    down = min(warps, rows // 16)
    return gl.NVMMADistributedLayout([3, 0], [down, warps // down], [16, max(columns, 16) * down // warps, 16])


@gluon.jit
def copy(smem, pointer, stride, left, ROWS: gl.constexpr, COLS: gl.constexpr, WARPS: gl.constexpr):
    """Rows into shared memory, asynchronously; those from `left` on are zero."""
    layout: gl.constexpr = pieces(COLS, WARPS)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLS, gl.SliceLayout(0, layout))
    async_load(smem, pointer + i[:, None] * stride + j[None, :], mask=(i < left)[:, None])


@gluon.jit
def copy_chunk(
    arrays,
    shared,
    stage,
    at,
    first,
    left,
    H: gl.constexpr,
    BASES: gl.constexpr,
    FACTORS: gl.constexpr,
    DELTA: gl.constexpr,
    DECAY: gl.constexpr,
):
    """All a scan needs of chunk and head `at`, whose first row is `first`: the multipliers, the bases, [M; PM]."""
    multipliers, rows, late, mixed, inverse = arrays
    m_s, r_s, l_s, w_s = shared
    at = at.to(gl.int64)
    copy(m_s.index(stage), multipliers + at * (FACTORS * 128), 128, FACTORS, FACTORS, 128, 8)
    copy(r_s.index(stage), rows + at * (128 * BASES), BASES, 128, 128, BASES, 8)
    if DECAY:
        copy(l_s.index(stage), late + at * (64 * BASES), BASES, 64, 64, BASES, 8)
    if DELTA:
        copy(w_s.index(stage).slice(0, 64, 0), inverse + first * 64, H * 64, left, 64, 64, 8)
    copy(w_s.index(stage).slice(64, 64, 0), mixed + at * 4096, 64, 64, 64, 64, 8)


@gluon.jit
def row_step(T0, bases, lines, line, j: gl.constexpr, EACH: gl.constexpr, ONES: gl.constexpr, left: gl.constexpr):
    """Step j of κ [rows,16]. A multiplier is every EACH-th of the lines."""
    if j < ONES:
        return T0 * lines.index(line + EACH * j).load(gl.SliceLayout(1, left))[:, None]
    else:
        x = lines.index(line + EACH * (2 * (j - ONES))).load(gl.SliceLayout(1, left))
        y = lines.index(line + EACH * (2 * (j - ONES) + 1)).load(gl.SliceLayout(1, left))
        col = gl.arange(0, 16, gl.SliceLayout(0, left))
        multiplier = gl.where((col < 8)[None, :], x[:, None], y[:, None])
        if j == 37:
            return T0 * multiplier
        else:
            base = bases.slice(16 if j < 37 else 16 * (j - 36), 16, 1).load(left)
            return base * multiplier


@gluon.jit
def column_base(bases, START: gl.constexpr):
    """16 of the bases [tokens,BASES], as a tile has them."""
    x = bases.slice(START, 16, 1).permute((1, 0)).load(BASE).reshape([2, 8, 64])
    x = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
    return gl.expand_dims(gl.expand_dims(x, 0), 1)


@gluon.jit
def column_tile(b0, b1, bases, keys, i: gl.constexpr, K: gl.constexpr, ONES: gl.constexpr, left: gl.constexpr):
    """Tile i of κᵀ [128,64]."""
    if i * 8 < ONES:
        x = keys.slice(i * 8, 8, 0).load(ONE).reshape([4, 2, 64])
        x = gl.convert_layout(x, gl.SliceLayout(2, gl.SliceLayout(3, TILE)))
        A = b0 * gl.expand_dims(gl.expand_dims(x, 2), 3)
    else:
        x = keys.slice(i * 16 - 2 * ONES, 16, 0).load(TWO).reshape([4, 2, 2, 64])
        x = gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(3, TILE)), 3)
        b = b1
        if i == 4 and K == 25:
            e = bases.slice(32, 32, 1).permute((1, 0)).load(EDGES).reshape([2, 2, 8, 64])
            e = gl.expand_dims(gl.convert_layout(e, gl.SliceLayout(0, TILE)), 0)
            high = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TILE)))))
            low = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, TILE)))))
            warp = gl.expand_dims(gl.expand_dims(gl.expand_dims(high[:, None] * 2 + low[None, :], 2), 3), 4)
            b = gl.where(warp < 5, b1, gl.where(warp == 5, b0, e))
        A = b * x
    return gl.convert_layout(A.reshape([128, 64]), left)


@gluon.jit
def feature(row, TILE: gl.constexpr, K: gl.constexpr, R: gl.constexpr, ONES: gl.constexpr, STEPS: gl.constexpr):
    """Where row `row` of a tile of the state lies among the K·R features, and whether it is one of them."""
    step = TILE * 8 + row // 16
    c = row % 16
    if TILE * 8 < ONES:
        return step * R + c, step < STEPS
    else:
        k = 2 * (step - ONES) + c // 8
        r = 16 + c % 8
        if K == 25:
            k = gl.where(step == 37, 24, gl.where(step >= 38, (step - 38) * 16 + c, k))
            r = gl.where(step == 37, c, gl.where(step >= 38, 24, r))
        return k * R + r, k < K


# The scans, forward and backward, hold this program's value columns of a state in two blocks, of V1 columns and of V2,
# which may be zero. A block is a tuple of tiles in registers, and the same rounded in shared memory.


@gluon.jit
def find_sequence(cu_seqlens, chunk_starts, T, H: gl.constexpr, PACKED: gl.constexpr):
    """This program's head, the first row of its sequence and the end, its first chunk and how many there are."""
    seq, h = gl.program_id(0) // H, gl.program_id(0) % H
    start, end, chunk = sequence(cu_seqlens, chunk_starts, seq, T, 64, PACKED)
    return h, start, end, chunk, ((end - start + 63) // 64).to(gl.int32)


@gluon.jit
def block(start, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The rows and the columns, from `start` on, of a product's result."""
    mma: gl.constexpr = accumulator(ROWS, WIDTH, 8)
    return gl.arange(0, ROWS, gl.SliceLayout(1, mma)), start + gl.arange(0, WIDTH, gl.SliceLayout(0, mma))


@gluon.jit
def allocate_chunks(dt: gl.constexpr, BASES: gl.constexpr, FACTORS: gl.constexpr, DECAY: gl.constexpr):
    """Shared memory for what `copy_chunk` copies, of two chunks."""
    m_s = gl.allocate_shared_memory(dt, [2, FACTORS, 128], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    r_s = gl.allocate_shared_memory(dt, [2, 128, BASES], swizzled(BASES))
    l_s = gl.allocate_shared_memory(dt, [2, 64, BASES], swizzled(BASES)) if DECAY else r_s
    w_s = gl.allocate_shared_memory(dt, [2, 128, 64], swizzled(64))
    return m_s, r_s, l_s, w_s


@gluon.jit
def begin_block(
    state,
    s_s,
    cells,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    WIDTH: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
):
    f, o = cells
    S = ()
    for i in gl.static_range(TILES):
        s = gl.zeros([128, WIDTH], gl.float32, accumulator(128, WIDTH, 8))
        if state is not None:
            place, real = feature(f, i, K, R, ONES, STEPS)
            s = gl.load(state + place[:, None] * V + o[None, :], mask=real[:, None], other=0.0)
        s_s.index(i).store(s.to(s_s.dtype))
        S = S + (s,)
    return S


@gluon.jit
def begin(
    state,
    dt: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
):
    """This program's columns of a state [K·R,V] in float32, or zeros for None: in registers and in shared
    memory; and which rows and columns these are."""
    v0 = gl.program_id(1) * (V1 + V2)
    s1_s = gl.allocate_shared_memory(dt, [TILES, 128, V1], swizzled(V1))
    s2_s = gl.allocate_shared_memory(dt, [TILES, 128, V2], swizzled(V2)) if V2 > 0 else s1_s
    cells1 = block(v0, 128, V1)
    cells2 = block(v0 + V1, 128, V2 if V2 > 0 else 16)
    S1 = begin_block(state, s1_s, cells1, K, R, V, V1, ONES, STEPS, TILES)
    S2 = ()
    if V2 > 0:
        S2 = begin_block(state, s2_s, cells2, K, R, V, V2, ONES, STEPS, TILES)
    return (S1, S2), (s1_s, s2_s), (cells1, cells2)


@gluon.jit
def finish(
    state,
    S,
    cells,
    K: gl.constexpr,
    R: gl.constexpr,
    V: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
    TILES: gl.constexpr,
):
    """Stores what `begin` would load."""
    S1, S2 = S
    f1, o1 = cells[0]
    f2, o2 = cells[1]
    for i in gl.static_range(TILES):
        place, real = feature(f1, i, K, R, ONES, STEPS)
        gl.store(state + place[:, None] * V + o1[None, :], S1[i], mask=real[:, None])
        if V2 > 0:
            place, real = feature(f2, i, K, R, ONES, STEPS)
            gl.store(state + place[:, None] * V + o2[None, :], S2[i], mask=real[:, None])


@gluon.jit
def save_block(states, s_s, V: gl.constexpr, WIDTH: gl.constexpr, TILES: gl.constexpr):
    layout: gl.constexpr = pieces(WIDTH, 8)
    i = gl.arange(0, 128, gl.SliceLayout(1, layout))
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    for tile in gl.static_range(TILES):
        gl.store(states + (tile * 128 + i)[:, None] * V + j[None, :], s_s.index(tile).load(layout))


@gluon.jit
def save(states, at, s_s, V: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, TILES: gl.constexpr):
    """The state as shared memory has it, tile by tile, as that of chunk and head `at`."""
    s1_s, s2_s = s_s
    states = states + at.to(gl.int64) * (TILES * 128 * V) + gl.program_id(1) * (V1 + V2)
    save_block(states, s1_s, V, V1, TILES)
    if V2 > 0:
        save_block(states + V1, s2_s, V, V2, TILES)


@gluon.jit
def multiply(
    bases,
    lines,
    line,
    s_s,
    ROWS: gl.constexpr,
    EACH: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    STEPS: gl.constexpr,
):
    """κS for the tokens whose bases these are."""
    s1_s, s2_s = s_s
    mma1: gl.constexpr = accumulator(ROWS, V1, 8)
    mma2: gl.constexpr = accumulator(ROWS, V2, 8)
    left1: gl.constexpr = gl.DotOperandLayout(0, mma1, 2)
    left2: gl.constexpr = gl.DotOperandLayout(0, mma2, 2)
    T0 = bases.slice(0, 16, 1).load(left1)
    a1 = gl.zeros([ROWS, V1], gl.float32, mma1)
    a2 = gl.zeros([ROWS, V2 if V2 > 0 else 16], gl.float32, mma2)
    for j in gl.static_range(STEPS):
        A = row_step(T0, bases, lines, line, j, EACH, ONES, left1)
        a1 = warpgroup_mma(A, s1_s.index(j // 8).slice(j % 8 * 16, 16, 0), a1, is_async=True)
        if V2 > 0:
            A2 = gl.convert_layout(A, left2)
            a2 = warpgroup_mma(A2, s2_s.index(j // 8).slice(j % 8 * 16, 16, 0), a2, is_async=True)
        if j % 2 == 1:  # or the operands of all steps would have to stay in registers
            a1, a2 = warpgroup_mma_wait(4 if V2 > 0 else 2, [a1, a2])
    return warpgroup_mma_wait(0, [a1, a2])


@gluon.jit
def update(
    S,
    s_s,
    X,
    total,
    bases,
    keys,
    K: gl.constexpr,
    V1: gl.constexpr,
    V2: gl.constexpr,
    ONES: gl.constexpr,
    TILES: gl.constexpr,
    STORE: gl.constexpr = True,
):
    """S + κᵀX, with S times `total` where it is not None; if STORE, in shared memory too."""
    S1, S2 = S
    s1_s, s2_s = s_s
    x1, x2 = X
    left1: gl.constexpr = gl.DotOperandLayout(0, accumulator(128, V1, 8), 2)
    left2: gl.constexpr = gl.DotOperandLayout(0, accumulator(128, V2, 8), 2)
    b0 = column_base(bases, 0)
    b1 = column_base(bases, 16) if ONES < TILES * 8 else b0
    N1 = ()
    N2 = ()
    A = column_tile(b0, b1, bases, keys, 0, K, ONES, left1)
    for i in gl.static_range(TILES):
        s1 = warpgroup_mma(A, x1, S1[i] if total is None else S1[i] * total, is_async=True)
        if V2 > 0:
            A2 = gl.convert_layout(A, left2)
            s2 = warpgroup_mma(A2, x2, S2[i] if total is None else S2[i] * total, is_async=True)
        if i + 1 < TILES:  # the next is formed while this one is multiplied
            A = column_tile(b0, b1, bases, keys, i + 1, K, ONES, left1)
        if V2 > 0:
            s1, s2 = warpgroup_mma_wait(0, [s1, s2])
            if STORE:
                s2_s.index(i).store(s2.to(s2_s.dtype))
            N2 = N2 + (s2,)
        else:
            s1 = warpgroup_mma_wait(0, [s1])
        if STORE:
            s1_s.index(i).store(s1.to(s1_s.dtype))
        N1 = N1 + (s1,)
    return N1, N2
