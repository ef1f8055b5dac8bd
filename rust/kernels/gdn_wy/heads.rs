//! The host's two kinds of work in `gdn_wy`: what value heads share (convolved q and k, their products), per segment
//! and key head, and then the recurrence itself, per segment and value head.
//!
//! Scratch holds one task's rows head by head. Rows are in topological order, so a row finds its ancestors finished.

use super::{
    FOLD_INTERVAL, GdnShape, GdnWeights, GdnWyArgs, MAX_ENTRIES, STATE_RING, SlotLog, anchor_of,
};
use crate::device::Buffer;
use crate::kernels::paths::{RowPaths, Segment};
use crate::kernels::simd::{self, LANES, Lanes, Task};

/// Added to the sum of squares of q and of k.
const KEY_NORM_EPS: f32 = 1e-6;

/// What all tasks of a pass read.
#[derive(Clone, Copy)]
pub(super) struct Pass<'a> {
    shape: &'a GdnShape,
    weights: GdnWeights<'a>,
    qkv: &'a [f32],
    z: &'a [f32],
    a: &'a [f32],
    b: &'a [f32],
    paths: &'a RowPaths,
    /// Of the segments that run.
    first_row: usize,
    states: &'a Buffer<f32>,
    log: (&'a Buffer<f32>, &'a Buffer<f32>, &'a Buffer<f32>),
    conv: &'a Buffer<f32>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(args: &GdnWyArgs<'a>) -> Self {
        let cache = args.cache;
        Self {
            shape: args.shape,
            weights: args.weights,
            qkv: args.qkv.host(),
            z: args.z.host(),
            a: args.a.host(),
            b: args.b.host(),
            paths: args.paths,
            first_row: args.paths.rows_of(&args.segments).start,
            states: &cache.states,
            log: (&cache.log_k, &cache.log_d, &cache.log_g),
            conv: &cache.conv,
        }
    }

    /// Position, anchor and path of a row.
    #[inline(always)]
    fn row(&self, segment: &Segment, row: usize) -> Row<'a> {
        let position = self.paths.position(row);
        let (path, committed_len) = (self.paths.path(row), segment.committed_len);
        Row {
            position,
            anchor: anchor_of(position),
            committed_len,
            first_row: segment.rows.start,
            ancestors: &path[..path.len() - 1],
        }
    }

    /// `out[row] = silu(conv(qkv))` over `channels`, for all rows of a segment.
    #[inline(always)]
    fn convolve<L: Lanes>(&self, segment: &Segment, first_channel: usize, out: &mut [f32]) {
        let num_taps = self.shape.conv_kernel;
        let num_channels = self.shape.conv_channels();
        let len = out.len() / segment.rows.len();
        let mut taps = vec![0.0; num_taps * len];
        let weights = &self.weights.conv.host()[first_channel * num_taps..];
        for (channel, weights) in weights.chunks_exact(num_taps).take(len).enumerate() {
            for (tap, &weight) in weights.iter().enumerate() {
                taps[tap * len + channel] = weight;
            }
        }
        let history = &self.conv.host()[segment.slot * num_taps * num_channels..];
        for (row, out) in segment.rows.clone().zip(out.chunks_exact_mut(len)) {
            let at = self.row(segment, row);
            out.fill(0.0);
            for (tap, weights) in taps.chunks_exact(len).enumerate() {
                let Some(position) = (at.position + tap + 1).checked_sub(num_taps) else {
                    continue;
                };
                let input = if position < at.committed_len {
                    &history[position % num_taps * num_channels..]
                } else {
                    let row = self.paths.path(row)[position - at.committed_len];
                    &self.qkv[row as usize * num_channels..]
                };
                multiply_add::<L>(weights, &input[first_channel..][..len], out);
            }
            for sums in out.chunks_mut(LANES) {
                store(load::<L>(sums).silu(), sums);
            }
        }
    }
}

/// Where a row stands.
struct Row<'a> {
    position: usize,
    anchor: usize,
    committed_len: usize,
    first_row: usize,
    ancestors: &'a [u32],
}

impl Row<'_> {
    /// Entries that the row reads.
    #[inline(always)]
    fn num_entries(&self) -> usize {
        self.position - self.anchor
    }

    /// Indices, within the segment, of the uncommitted rows among them.
    #[inline(always)]
    fn tail_rows(&self) -> impl DoubleEndedIterator<Item = usize> {
        let first_row = self.first_row;
        self.ancestors
            .iter()
            .map(move |&row| row as usize - first_row)
    }
}

/// `y += a * b`, element by element.
#[inline(always)]
fn multiply_add<L: Lanes>(a: &[f32], b: &[f32], y: &mut [f32]) {
    for ((a, b), y) in a
        .chunks(LANES)
        .zip(b.chunks(LANES))
        .zip(y.chunks_mut(LANES))
    {
        let sum = load::<L>(a).mul_add(load::<L>(b), load::<L>(y));
        store::<L>(sum, y);
    }
}

// Functions of many instructions stand in loops, not in closures: a closure that the compiler does not inline loses
// the instruction set of its caller.
#[inline(always)]
fn load<L: Lanes>(values: &[f32]) -> L {
    if values.len() >= LANES {
        L::load(values)
    } else {
        L::load_partial(values)
    }
}

#[inline(always)]
fn store<L: Lanes>(lanes: L, values: &mut [f32]) {
    if values.len() >= LANES {
        lanes.store(values);
    } else {
        lanes.store_partial(values);
    }
}

/// q, k and their products for one key head of one segment.
pub(super) struct KeyHead<'a> {
    pass: Pass<'a>,
    segment: &'a Segment,
    head: usize,
    scratch: &'a mut [f32],
}

/// Results of a [`KeyHead`]: `q`, `k` `[rows, Dk]`, and per row the products of k and of q with its entries' keys,
/// `[rows, 2, MAX_ENTRIES + 1]`; behind the entries comes q with the row's own key.
struct KeyRows<'a> {
    q: &'a [f32],
    k: &'a [f32],
    products: &'a [f32],
}

const PRODUCTS: usize = 2 * (MAX_ENTRIES + 1);

impl<'a> KeyHead<'a> {
    /// Scratch per row.
    pub(super) fn row_len(shape: &GdnShape) -> usize {
        2 * shape.key_dim + PRODUCTS
    }

    pub(super) fn new(
        pass: Pass<'a>,
        segment: &'a Segment,
        head: usize,
        scratch: &'a mut [f32],
    ) -> Self {
        Self {
            pass,
            segment,
            head,
            scratch,
        }
    }

    /// The keys in a finished task's scratch.
    pub(super) fn keys<'s>(shape: &GdnShape, segment: &Segment, scratch: &'s [f32]) -> &'s [f32] {
        let len = segment.rows.len() * shape.key_dim;
        &scratch[len..2 * len]
    }
}

impl Task for KeyHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Self {
            pass,
            segment,
            head,
            scratch,
        } = self;
        let shape = pass.shape;
        let dim = shape.key_dim;
        let (q, rest) = scratch.split_at_mut(segment.rows.len() * dim);
        let (k, products) = rest.split_at_mut(segment.rows.len() * dim);
        if q.is_empty() {
            return;
        }
        pass.convolve::<L>(segment, head * dim, q);
        pass.convolve::<L>(segment, shape.keys_len() + head * dim, k);
        normalise::<L>(q, dim, 1.0 / (dim as f32).sqrt());
        normalise::<L>(k, dim, 1.0);

        let log = SlotLog::new(shape, pass.log, segment.slot);
        for (i, products) in products.chunks_exact_mut(PRODUCTS).enumerate() {
            let row = pass.row(segment, segment.rows.start + i);
            let (k_products, q_products) = products.split_at_mut(PRODUCTS / 2);
            let (own_q, own_k) = (&q[i * dim..][..dim], &k[i * dim..][..dim]);
            let logged = (row.anchor..row.committed_len).map(|p| log.k(shape, p, head));
            let keys = logged.chain(row.tail_rows().map(|r| &k[r * dim..][..dim]));
            for ((key, kk), qk) in keys.zip(k_products).zip(&mut *q_products) {
                [*kk, *qk] = simd::dots::<L, 2>(key, [own_k, own_q]);
            }
            q_products[row.num_entries()] = simd::dot::<L>(own_q, own_k);
        }
    }
}

/// Scales every vector of length `dim` to length `scale`.
#[inline(always)]
fn normalise<L: Lanes>(vectors: &mut [f32], dim: usize, scale: f32) {
    for vector in vectors.chunks_exact_mut(dim) {
        let norm = (simd::dot::<L>(vector, vector) + KEY_NORM_EPS).sqrt();
        let factor = L::splat(scale / norm);
        simd::map1::<L>(vector, |x| x.mul(factor));
    }
}

/// The recurrence and the gated norm for one value head of one segment.
pub(super) struct ValueHead<'a> {
    pass: Pass<'a>,
    segment: &'a Segment,
    head: usize,
    keys: KeyRows<'a>,
    scratch: &'a mut [f32],
}

/// Per row: the factors of its entries' d in `d` and in `o`, `w_j k_t.k_j` and `w_j q_t.k_j`, and behind the second
/// kind q with the own key.
const FACTORS: usize = PRODUCTS;

impl<'a> ValueHead<'a> {
    /// Scratch per row: d, y, g, beta, e0 and the factors.
    pub(super) fn row_len(shape: &GdnShape) -> usize {
        2 * shape.value_dim + 3 + FACTORS
    }

    /// `keys` is the scratch of all finished [`KeyHead`] tasks.
    pub(super) fn new(
        pass: Pass<'a>,
        segment: &'a Segment,
        head: usize,
        keys: &'a [f32],
        scratch: &'a mut [f32],
    ) -> Self {
        let shape = pass.shape;
        let num_rows = segment.rows.len();
        let key_head = head / (shape.num_value_heads / shape.num_key_heads);
        let first =
            (segment.rows.start - pass.first_row) * shape.num_key_heads + key_head * num_rows;
        let stride = KeyHead::row_len(shape);
        let keys = &keys[first * stride..][..num_rows * stride];
        let (q, rest) = keys.split_at(num_rows * shape.key_dim);
        let (k, products) = rest.split_at(num_rows * shape.key_dim);
        Self {
            pass,
            segment,
            head,
            keys: KeyRows { q, k, products },
            scratch,
        }
    }

    /// d, y and g in a finished task's scratch.
    pub(super) fn results<'s>(
        shape: &GdnShape,
        segment: &Segment,
        scratch: &'s [f32],
    ) -> [&'s [f32]; 3] {
        let num_rows = segment.rows.len();
        let len = num_rows * shape.value_dim;
        [
            &scratch[..len],
            &scratch[len..2 * len],
            &scratch[2 * len..][..num_rows],
        ]
    }

    /// Log decay of every row, `-e^A_log softplus(a + dt_bias)`, and its update strength `sigmoid(b)`, through f64 so
    /// that no library's single-precision functions decide bits.
    fn gates(&self, g: &mut [f32], beta: &mut [f32]) {
        let Pass { weights, .. } = self.pass;
        let rate = f64::from(weights.a_log.host()[self.head]).exp();
        let bias = weights.dt_bias.host()[self.head];
        for ((row, g), beta) in self.segment.rows.clone().zip(g).zip(beta) {
            let at = row * self.pass.shape.num_value_heads + self.head;
            let x = f64::from(self.pass.a[at] + bias);
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            *g = (-rate * softplus) as f32;
            *beta = (1.0 / (1.0 + (-f64::from(self.pass.b[at])).exp())) as f32;
        }
    }
}

impl Task for ValueHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self) {
        let (shape, segment) = (self.pass.shape, self.segment);
        let (num_rows, dim) = (segment.rows.len(), shape.value_dim);
        if num_rows == 0 {
            return;
        }
        let scratch = std::mem::take(&mut self.scratch);
        let (d, rest) = scratch.split_at_mut(num_rows * dim);
        let (y, rest) = rest.split_at_mut(num_rows * dim);
        let (g, rest) = rest.split_at_mut(num_rows);
        let (beta, rest) = rest.split_at_mut(num_rows);
        let (e0, factors) = rest.split_at_mut(num_rows);

        let first_channel = 2 * shape.keys_len() + self.head * dim;
        self.pass.convolve::<L>(segment, first_channel, d);
        self.gates(g, beta);
        self.weigh_entries::<L>(g, e0, factors);

        let rows = Columns {
            head: &self,
            beta,
            e0,
            factors,
        };
        const WIDE: usize = 4 * LANES;
        let mut from = 0;
        while from < dim {
            if dim - from >= WIDE {
                rows.run::<L, 4>(from, WIDE, d, y);
                from += WIDE;
            } else {
                let width = (dim - from).min(LANES);
                rows.run::<L, 1>(from, width, d, y);
                from += width;
            }
        }

        let norm_weight = self.pass.weights.norm.host();
        for (row, y) in segment.rows.clone().zip(y.chunks_exact_mut(dim)) {
            let mean = simd::dot::<L>(y, y) / dim as f32;
            let factor = L::splat(1.0 / (mean + self.pass.weights.norm_eps).sqrt());
            simd::map2::<L>(&norm_weight[..dim], y, |w, y| y.mul(factor).mul(w));
            let z = &self.pass.z[(row * shape.num_value_heads + self.head) * dim..][..dim];
            for (z, y) in z.chunks(LANES).zip(y.chunks_mut(LANES)) {
                store(load::<L>(y).mul(load::<L>(z).silu()), y);
            }
        }
    }
}

impl ValueHead<'_> {
    /// Decays of all rows' entries, times the shared products.
    #[inline(always)]
    fn weigh_entries<L: Lanes>(&self, g: &[f32], e0: &mut [f32], factors: &mut [f32]) {
        let shape = self.pass.shape;
        let log = SlotLog::new(shape, self.pass.log, self.segment.slot);
        for (i, factors) in factors.chunks_exact_mut(FACTORS).enumerate() {
            let row = self.pass.row(self.segment, self.segment.rows.start + i);
            let num_entries = row.num_entries();
            let mut decays = [0.0; MAX_ENTRIES + 1];
            let mut sum = g[i];
            let logged = (row.anchor..row.committed_len).map(|p| log.g(shape, p, self.head));
            let entries = logged.chain(row.tail_rows().map(|r| g[r]));
            for (decay, g) in decays[..num_entries].iter_mut().rev().zip(entries.rev()) {
                *decay = sum;
                sum += g;
            }
            decays[num_entries] = sum;
            let decays = &mut decays[..=num_entries];
            for exponents in decays.chunks_mut(LANES) {
                store(load::<L>(exponents).exp(), exponents);
            }
            e0[i] = decays[num_entries];

            let products = &self.keys.products[i * PRODUCTS..][..PRODUCTS];
            factors.copy_from_slice(products);
            let (for_d, for_o) = factors.split_at_mut(FACTORS / 2);
            let decays = &decays[..num_entries];
            simd::map2::<L>(decays, &mut for_d[..num_entries], |w, kk| w.mul(kk));
            simd::map2::<L>(decays, &mut for_o[..num_entries], |w, qk| w.mul(qk));
        }
    }
}

/// The substitution, for a few value lanes at a time: lanes do not mix, and the state's columns for one group of them
/// stay in the first-level cache while all rows pass.
struct Columns<'a> {
    head: &'a ValueHead<'a>,
    beta: &'a [f32],
    e0: &'a [f32],
    factors: &'a [f32],
}

impl Columns<'_> {
    /// Lanes `from..from + width`, `N` vectors: turns v into d in place, writes o to `y`.
    #[inline(always)]
    fn run<L: Lanes, const N: usize>(
        &self,
        from: usize,
        width: usize,
        d: &mut [f32],
        y: &mut [f32],
    ) {
        let head = self.head;
        let shape = head.pass.shape;
        let (key_dim, dim) = (shape.key_dim, shape.value_dim);
        let log = SlotLog::new(shape, head.pass.log, head.segment.slot);
        let states = head.pass.states.host();
        for (i, row) in head.segment.rows.clone().enumerate() {
            let row = head.pass.row(head.segment, row);
            let ring = head.segment.slot * STATE_RING + row.anchor / FOLD_INTERVAL % STATE_RING;
            let state = (ring * shape.num_value_heads + head.head) * key_dim * dim;
            let state = &states[state..][..key_dim * dim];
            let k = &head.keys.k[i * key_dim..][..key_dim];
            let q = &head.keys.q[i * key_dim..][..key_dim];
            let mut seen = [L::splat(0.0); N];
            let mut out = [L::splat(0.0); N];
            for ((&k, &q), state) in k.iter().zip(q).zip(state.chunks_exact(dim)) {
                add_twice(&state[from..][..width], k, q, &mut seen, &mut out);
            }
            let e0 = L::splat(self.e0[i]);
            seen = seen.map(|sum| sum.mul(e0));
            out = out.map(|sum| sum.mul(e0));

            let factors = &self.factors[i * FACTORS..][..FACTORS];
            let (for_d, for_o) = factors.split_at(FACTORS / 2);
            let mut factors = for_d.iter().zip(for_o);
            for position in row.anchor..row.committed_len {
                let (&kk, &qk) = factors.next().expect("a factor per entry");
                let entry = &log.d(shape, position, head.head)[from..][..width];
                add_twice(entry, kk, qk, &mut seen, &mut out);
            }
            for tail_row in row.tail_rows() {
                let (&kk, &qk) = factors.next().expect("a factor per entry");
                let entry = &d[tail_row * dim + from..][..width];
                add_twice(entry, kk, qk, &mut seen, &mut out);
            }

            let beta = L::splat(self.beta[i]);
            let own = L::splat(for_o[row.num_entries()]);
            let d = &mut d[i * dim + from..][..width];
            let y = &mut y[i * dim + from..][..width];
            for (n, (seen, out)) in seen.into_iter().zip(out).enumerate() {
                let d = &mut d[n * LANES..];
                let update = beta.mul(load::<L>(d).sub(seen));
                store(update, d);
                store(own.mul_add(update, out), &mut y[n * LANES..]);
            }
        }
    }
}

/// `seen += k * x`, `out += q * x`.
#[inline(always)]
fn add_twice<L: Lanes, const N: usize>(
    x: &[f32],
    k: f32,
    q: f32,
    seen: &mut [L; N],
    out: &mut [L; N],
) {
    let (k, q) = (L::splat(k), L::splat(q));
    for n in 0..N {
        let x = load::<L>(&x[n * LANES..]);
        seen[n] = k.mul_add(x, seen[n]);
        out[n] = q.mul_add(x, out[n]);
    }
}
