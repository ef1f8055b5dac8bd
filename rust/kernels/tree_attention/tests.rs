//! One token path as single tokens, chunks and branches of trees, behind whole tables and rings: equal bits, and close to
//! a naive f64 softmax.

use proptest::prelude::*;

use super::*;
use crate::cache::pages::{KvCache, KvLayout, KvShape, KvTail};
use crate::device::Device;
use crate::kernels::kv_span::PerSpan;
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::random_trees::{ChainInTree, Numbers};

struct Model {
    device: Device,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    seed: u64,
}

impl Model {
    fn new(seed: u64, head_dim: usize, window: Option<usize>) -> Self {
        Self {
            device: Device::host(Some(2)).unwrap(),
            q_heads: 6,
            kv_heads: 2,
            head_dim,
            window,
            seed,
        }
    }

    /// q, k, v of the row that a part of the seed stands for.
    fn input(&self, part: u64) -> [Vec<f32>; 3] {
        let mut numbers = Numbers::new(self.seed, part);
        let kv_len = self.kv_heads * self.head_dim;
        [
            numbers.vector(self.q_heads * self.head_dim, 2.0),
            numbers.vector(kv_len, 2.0),
            numbers.vector(kv_len, 1.0),
        ]
    }

    fn token(&self, position: usize) -> [Vec<f32>; 3] {
        self.input(1 + position as u64)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// A cache that keeps `span` of what it is told, and tables of a request in it.
    fn cache(&self, span: KvSpan, num_tokens: usize) -> (KvCache, PerSpan<Vec<u32>>) {
        let shape = KvShape {
            num_kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        };
        let window = self.window.filter(|_| span == KvSpan::Window);
        // Trees write nothing ahead of what they see.
        let layout = KvLayout::new([(shape, window)], 0);
        let num_pages = PerSpan {
            whole: 16,
            window: layout.ring_pages(),
        };
        let mut cache = KvCache::new(&self.device, layout, num_pages).unwrap();
        let mut tables = PerSpan::default();
        assert!(cache.reserve(&mut tables, num_tokens));
        (cache, tables)
    }

    /// Outputs of the chain's tokens, run through trees that `next` gives together with the rows to commit. What a row
    /// may not see is NaN: where nothing is committed yet, and what fell out of the window.
    fn run(
        &self,
        span: KvSpan,
        num_tokens: usize,
        mut next: impl FnMut() -> (ChainInTree, usize),
    ) -> Vec<Vec<f32>> {
        let (mut cache, mut tables) = self.cache(span, num_tokens);
        // Pages out of order.
        tables.whole.reverse();
        let mut outputs = vec![];
        let mut part = 1 << 32;
        while outputs.len() < num_tokens {
            let len = outputs.len();
            cache.poison_unseen(&[self.window], &[(tables.tables(), len)]);
            let (tree, num_commits) = next();
            let mut inputs: Vec<_> = (0..tree.parents.len() as u64)
                .map(|i| self.input(part + i))
                .collect();
            part += inputs.len() as u64;
            for (i, &row) in tree.chain.iter().enumerate() {
                inputs[row] = self.token(len + i);
            }
            let [q, k, v] = std::array::from_fn(|i| {
                let values: Vec<f32> = inputs.iter().flat_map(|row| row[i].clone()).collect();
                Buffer::from_slice(&values)
            });
            let mut paths = RowPaths::default();
            paths
                .push_segment(0, len, tables.tables(), &tree.parents)
                .unwrap();
            let mut out = Buffer::from_slice(&vec![f32::NAN; q.len()]);
            let args = TreeAttentionArgs {
                q: &q,
                k_tail: &k,
                v_tail: &v,
                k_pages: cache.k(0),
                v_pages: cache.v(0),
                paths: &paths,
                span,
                q_heads: self.q_heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                scale: self.scale(),
                window: self.window,
                out: &mut out,
            };
            TreeAttention::run(&self.device, args).unwrap();
            let rows = &tree.chain[..num_commits.min(num_tokens - len)];
            let row_len = self.q_heads * self.head_dim;
            outputs.extend(
                rows.iter()
                    .map(|row| out.host()[row * row_len..][..row_len].to_vec()),
            );
            let mut placed = PlacedRows::default();
            let taken = rows.iter().map(|&row| row as u32);
            placed.push(0, len, tables.tables(), taken).unwrap();
            let tail = KvTail {
                layer: 0,
                k: &k,
                v: &v,
            };
            cache.append(&self.device, &placed, &[tail]).unwrap();
        }
        outputs
    }

    /// What the layer may keep.
    fn spans(&self) -> &'static [KvSpan] {
        match self.window {
            Some(_) => &KvSpan::ALL,
            None => &KvSpan::ALL[..1],
        }
    }

    fn token_by_token(&self, num_tokens: usize) -> Vec<Vec<f32>> {
        self.run(KvSpan::Whole, num_tokens, || (ChainInTree::chain(1), 1))
    }

    fn oracle(&self, num_tokens: usize) -> Vec<Vec<f64>> {
        let tokens: Vec<_> = (0..num_tokens).map(|p| self.token(p)).collect();
        let dim = self.head_dim;
        (0..num_tokens)
            .map(|t| {
                let first = self.window.map_or(0, |w| (t + 1).saturating_sub(w));
                let mut out = vec![];
                for h in 0..self.q_heads {
                    let kv = h / (self.q_heads / self.kv_heads) * dim;
                    let q = &tokens[t][0][h * dim..][..dim];
                    let weights: Vec<f64> = tokens[first..=t]
                        .iter()
                        .map(|[_, k, _]| {
                            let k = &k[kv..][..dim];
                            let dot: f64 = q
                                .iter()
                                .zip(k)
                                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                                .sum();
                            (dot * f64::from(self.scale())).exp()
                        })
                        .collect();
                    let sum: f64 = weights.iter().sum();
                    out.extend((0..dim).map(|i| {
                        let values = tokens[first..=t]
                            .iter()
                            .map(|[_, _, v]| f64::from(v[kv + i]));
                        weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>() / sum
                    }));
                }
                out
            })
            .collect()
    }
}

fn assert_same(a: &[Vec<f32>], b: &[Vec<f32>], what: &str) {
    assert_eq!(a.len(), b.len());
    for (t, (a, b)) in a.iter().zip(b).enumerate() {
        let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{what}: token {t}");
    }
}

#[test]
fn chunks_agree_with_single_tokens_to_the_bit() {
    for (head_dim, window) in [(128, None), (24, Some(100)), (64, Some(256)), (40, Some(1))] {
        let model = Model::new(21, head_dim, window);
        let reference = model.token_by_token(600);
        for span in model.spans() {
            for len in [1, 3, 63, 64] {
                let run = model.run(*span, 600, || (ChainInTree::chain(len), len));
                let what = format!("window {window:?}, {span:?}, chunks of {len}");
                assert_same(&run, &reference, &what);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn branches_of_trees_agree_with_single_tokens_to_the_bit(
        seed: u64,
        window in proptest::option::of(1_usize..400),
    ) {
        let model = Model::new(seed, 32, window);
        let reference = model.token_by_token(560);
        let mut numbers = Numbers::new(seed, 1 << 40);
        for span in model.spans() {
            let run = model.run(*span, 560, || {
                let chain_len = 1 + numbers.below(40);
                let num_others = numbers.below(40);
                let tree = ChainInTree::random(&mut numbers, chain_len, num_others);
                (tree, 1 + numbers.below(chain_len))
            });
            assert_same(&run, &reference, &format!("random trees, {span:?}"));
        }
    }
}

#[test]
fn results_are_close_to_a_naive_softmax() {
    for (head_dim, window) in [(128, None), (24, Some(70)), (7, Some(1)), (80, Some(300))] {
        let model = Model::new(22, head_dim, window);
        let span = model.spans().last().copied().unwrap();
        let run = model.run(span, 530, || (ChainInTree::chain(50), 50));
        let mut worst = 0.0_f64;
        for (got, want) in run.iter().zip(model.oracle(530)) {
            for (&got, want) in got.iter().zip(want) {
                worst = worst.max((f64::from(got) - want).abs());
            }
        }
        assert!(worst < 3e-6, "window {window:?}: {worst:e}");
    }
}

#[test]
fn pages_that_are_missing_or_foreign_are_refused() {
    let model = Model::new(23, 16, None);
    let rows: Buffer<f32> = model.device.try_alloc(6 * 16).unwrap();
    let pages: Buffer<f32> = model.device.try_alloc(4 * 2 * KV_BLOCK * 16).unwrap();
    let check = |table: &[u32], window| {
        let mut out: Buffer<f32> = model.device.try_alloc(6 * 16).unwrap();
        let mut paths = RowPaths::default();
        paths.push_segment(0, 65, table, &[None]).unwrap();
        TreeAttention::run(
            &model.device,
            TreeAttentionArgs {
                q: &rows,
                k_tail: &rows,
                v_tail: &rows,
                k_pages: &pages,
                v_pages: &pages,
                paths: &paths,
                span: KvSpan::Whole,
                q_heads: 6,
                kv_heads: 2,
                head_dim: 16,
                scale: 1.0,
                window,
                out: &mut out,
            },
        )
    };
    assert!(check(&[0, 3], None).is_ok());
    assert!(matches!(
        check(&[0], None),
        Err(KernelError::BufferTooShort {
            argument: "pages",
            expected: 2,
            got: 1,
            ..
        })
    ));
    assert!(matches!(
        check(&[0, 4], None),
        Err(KernelError::OutOfRange {
            bound: 4,
            got: 4,
            ..
        })
    ));
    assert!(matches!(
        check(&[0, 3], Some(0)),
        Err(KernelError::Size {
            argument: "window",
            ..
        })
    ));
}
