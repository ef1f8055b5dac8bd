//! One token path, many ways to run it: all must agree to the bit, and with a sequential f64 recurrence.

use proptest::prelude::*;

use super::*;
use crate::kernels::gdn_wy::{GdnWeights, GdnWy, GdnWyArgs};
use crate::kernels::paths::{RowPaths, Wave, num_settled_rows};
use crate::kernels::random_trees::{ChainInTree, Numbers};

const NUM_LAYERS: usize = 2;
const NUM_TOKENS: usize = 600;

/// Key and value lengths that fill vectors, wide blocks and neither.
fn shape(value_dim: usize) -> GdnShape {
    GdnShape {
        num_key_heads: 2,
        num_value_heads: 4,
        key_dim: 24,
        value_dim,
        conv_kernel: 4,
    }
}

/// Inputs of one row.
#[derive(Clone)]
struct Input {
    qkv: Vec<f32>,
    z: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
}

/// One layer stack with one set of inputs per token of the chain.
struct Model {
    shape: GdnShape,
    device: Device,
    conv: Buffer<f32>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    norm: Buffer<f32>,
    seed: u64,
}

/// Slot, parents and inputs of one request's rows.
type SegmentRows<'a> = (usize, &'a [Option<usize>], &'a [Input]);

/// What a row gave: y, k, d, g of every layer.
type Outputs = Vec<Vec<f32>>;

impl Model {
    /// `rate` is A_log: about -7 hardly decays, 3 forgets within a token.
    fn new(seed: u64, shape: GdnShape, rate: f32) -> Self {
        let mut numbers = Numbers::new(seed, 0);
        let heads = shape.num_value_heads;
        let mut vector = |len, scale| Buffer::from_slice(&numbers.vector(len, scale));
        let mut a_log = vector(heads, 0.5);
        a_log.host_mut().iter_mut().for_each(|x| *x += rate);
        Self {
            conv: vector(shape.conv_channels() * shape.conv_kernel, 0.7),
            a_log,
            dt_bias: vector(heads, 1.0),
            norm: vector(shape.value_dim, 1.0),
            device: Device::host(Some(2)).unwrap(),
            shape,
            seed,
        }
    }

    fn input(&self, part: u64) -> Input {
        let mut numbers = Numbers::new(self.seed, part);
        let shape = &self.shape;
        Input {
            qkv: numbers.vector(shape.conv_channels(), 1.5),
            z: numbers.vector(shape.values_len(), 2.0),
            a: numbers.vector(shape.num_value_heads, 3.0),
            b: numbers.vector(shape.num_value_heads, 3.0),
        }
    }

    /// Input of the chain's token at a position.
    fn token(&self, position: usize) -> Input {
        self.input(1 + position as u64)
    }

    fn cache(&self, num_slots: usize) -> GdnCache {
        GdnCache::new(
            &self.device,
            Recurrence::Anchored,
            self.shape.clone(),
            NUM_LAYERS,
            num_slots,
        )
        .unwrap()
    }

    /// Runs a pass over the given segments `(slot, parents, inputs)`; layers differ in their gate `b`. Returns what
    /// each row gave, and the pass's buffers for committing.
    fn pass(&self, cache: &mut GdnCache, segments: &[SegmentRows<'_>]) -> Pass {
        let mut paths = RowPaths::default();
        let mut inputs: Vec<&Input> = vec![];
        for (slot, parents, rows) in segments {
            let committed_len = cache.slots[*slot].committed_len;
            paths
                .push_segment(*slot, committed_len, &[], parents)
                .unwrap();
            let last = paths.positions().values()[inputs.len()..]
                .iter()
                .max()
                .unwrap();
            cache.prepare(&self.device, *slot, *last as usize).unwrap();
            inputs.extend(rows.iter());
        }
        self.run_layers(cache, &paths, &inputs, NUM_LAYERS)
    }

    /// Runs the first `num_layers` layers, wave by wave.
    fn run_layers(
        &self,
        cache: &mut GdnCache,
        paths: &RowPaths,
        inputs: &[&Input],
        num_layers: usize,
    ) -> Pass {
        let shape = &self.shape;
        let column = |of: &dyn Fn(&Input) -> &[f32]| {
            let values: Vec<f32> = inputs.iter().flat_map(|i| of(i)).copied().collect();
            Buffer::from_slice(&values)
        };
        let qkv = column(&|i| &i.qkv);
        let (z, a) = (column(&|i| &i.z), column(&|i| &i.a));
        let mut pass = Pass {
            qkv,
            tails: vec![],
            outputs: vec![vec![]; inputs.len()],
        };
        for layer in 0..num_layers {
            let mut b = column(&|i| &i.b);
            b.host_mut().iter_mut().for_each(|b| *b += layer as f32);
            let mut tail = GdnTail::new(&self.device, shape, inputs.len()).unwrap();
            let mut y: Buffer<f32> = self
                .device
                .try_alloc(inputs.len() * shape.values_len())
                .unwrap();
            for Wave { segments, settled } in paths.waves() {
                let args = GdnWyArgs {
                    shape,
                    weights: GdnWeights {
                        conv: &self.conv,
                        a_log: &self.a_log,
                        dt_bias: &self.dt_bias,
                        norm: &self.norm,
                        norm_eps: 1e-6,
                    },
                    qkv: &pass.qkv,
                    z: &z,
                    a: &a,
                    b: &b,
                    paths,
                    segments,
                    cache: cache.layer(layer),
                    tail: &mut tail,
                    y: (&mut y).into(),
                };
                GdnWy::run(&self.device, args).unwrap();
                if let Some(settled) = settled {
                    let kept = (&pass.qkv, &tail);
                    cache.settle(&self.device, layer, settled, kept).unwrap();
                }
            }
            for (row, outputs) in pass.outputs.iter_mut().enumerate() {
                for buffer in [&y, &tail.k, &tail.d, &tail.g] {
                    let len = buffer.len() / inputs.len();
                    outputs.push(buffer.host()[row * len..][..len].to_vec());
                }
            }
            pass.tails.push(tail);
        }
        pass
    }

    /// Runs the first `num_layers` layers over the chain's next `num_rows` tokens, as one prompt chunk.
    fn prompt(
        &self,
        cache: &mut GdnCache,
        slot: usize,
        num_rows: usize,
        num_layers: usize,
    ) -> Pass {
        let len = cache.slots[slot].committed_len;
        let mut paths = RowPaths::default();
        paths.push_prompt(slot, len, &[], num_rows).unwrap();
        let last_of_first = paths.segments()[0].rows.end - 1;
        let last_position = paths.position(last_of_first);
        cache.prepare(&self.device, slot, last_position).unwrap();
        let inputs: Vec<Input> = (len..len + num_rows).map(|p| self.token(p)).collect();
        let inputs: Vec<&Input> = inputs.iter().collect();
        self.run_layers(cache, &paths, &inputs, num_layers)
    }

    /// Commits rows that take the slot's next positions; those of a long prompt are settled but for the last segment's.
    fn commit(&self, cache: &mut GdnCache, slot: usize, pass: &Pass, rows: &[usize]) {
        let len = cache.slots[slot].committed_len;
        let num_settled = num_settled_rows(rows.len());
        let mut placed = PlacedRows::default();
        let taken = rows[num_settled..].iter().map(|&row| row as u32);
        placed.push(slot, len + num_settled, &[], taken).unwrap();
        let tails: Vec<_> = pass.tails.iter().map(|tail| (&pass.qkv, tail)).collect();
        cache.append(&self.device, &placed, &tails).unwrap();
        cache.advance(slot, len + rows.len());
    }

    /// Runs the chain through trees that `next` gives for each committed length, committing as many of their chain's
    /// rows as it says.
    fn run(&self, num_tokens: usize, mut next: impl FnMut(usize) -> (ChainInTree, usize)) -> Run {
        let mut cache = self.cache(1);
        cache.reset(0);
        let mut outputs: Vec<Outputs> = vec![];
        let mut part = 1 << 32;
        while outputs.len() < num_tokens {
            let len = outputs.len();
            let (tree, num_commits) = next(len);
            let mut inputs: Vec<Input> = (0..tree.parents.len())
                .map(|i| self.input(part + i as u64))
                .collect();
            part += inputs.len() as u64;
            for (i, &row) in tree.chain.iter().enumerate() {
                inputs[row] = self.token(len + i);
            }
            let pass = self.pass(&mut cache, &[(0, &tree.parents, &inputs)]);
            let rows = &tree.chain[..num_commits.min(num_tokens - len)];
            self.commit(&mut cache, 0, &pass, rows);
            outputs.extend(rows.iter().map(|&row| pass.outputs[row].clone()));
        }
        let states = (0..NUM_LAYERS)
            .map(|layer| cache.final_state(layer, 0, num_tokens).unwrap())
            .collect();
        Run { outputs, states }
    }

    fn token_by_token(&self, num_tokens: usize) -> Run {
        self.run(num_tokens, |_| (ChainInTree::chain(1), 1))
    }

    /// The recurrence of layer 0 in f64, token after token: outputs y and the final state.
    fn oracle(&self, num_tokens: usize) -> (Vec<Vec<f64>>, Vec<f64>) {
        let shape = &self.shape;
        let (dk, dv) = (shape.key_dim, shape.value_dim);
        let tokens: Vec<Input> = (0..num_tokens).map(|p| self.token(p)).collect();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let mut state = vec![0.0_f64; shape.state_len()];
        let mut ys = vec![];
        for (t, token) in tokens.iter().enumerate() {
            let conv: Vec<f64> = (0..shape.conv_channels())
                .map(|c| {
                    let taps = &self.conv.host()[c * shape.conv_kernel..][..shape.conv_kernel];
                    let sum: f64 = (0..shape.conv_kernel.min(t + 1))
                        .map(|r| {
                            f64::from(taps[shape.conv_kernel - 1 - r])
                                * f64::from(tokens[t - r].qkv[c])
                        })
                        .sum();
                    silu(sum)
                })
                .collect();
            let unit = |v: &[f64]| -> Vec<f64> {
                let norm = (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                v.iter().map(|x| x / norm).collect()
            };
            let mut y = vec![];
            for h in 0..shape.num_value_heads {
                let kh = h / (shape.num_value_heads / shape.num_key_heads);
                let q = unit(&conv[kh * dk..][..dk]);
                let k = unit(&conv[shape.keys_len() + kh * dk..][..dk]);
                let v = &conv[2 * shape.keys_len() + h * dv..][..dv];
                let x = f64::from(token.a[h]) + f64::from(self.dt_bias.host()[h]);
                let alpha = (-f64::from(self.a_log.host()[h]).exp() * x.exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + (-f64::from(token.b[h])).exp());
                let state = &mut state[h * dk * dv..][..dk * dv];
                state.iter_mut().for_each(|s| *s *= alpha);
                let read = |state: &[f64], x: &[f64], j: usize| -> f64 {
                    (0..dk).map(|i| state[i * dv + j] * x[i]).sum()
                };
                let d: Vec<f64> = (0..dv)
                    .map(|j| beta * (v[j] - read(state, &k, j)))
                    .collect();
                for i in 0..dk {
                    for j in 0..dv {
                        state[i * dv + j] += k[i] * d[j];
                    }
                }
                let o: Vec<f64> = (0..dv)
                    .map(|j| read(state, &q, j) / (dk as f64).sqrt())
                    .collect();
                let rms = (o.iter().map(|o| o * o).sum::<f64>() / dv as f64 + 1e-6).sqrt();
                y.extend((0..dv).map(|j| {
                    let z = f64::from(token.z[h * dv + j]);
                    o[j] / rms * f64::from(self.norm.host()[j]) * silu(z)
                }));
            }
            ys.push(y);
        }
        (ys, state)
    }
}

struct Pass {
    qkv: Buffer<f32>,
    tails: Vec<GdnTail>,
    outputs: Vec<Outputs>,
}

#[derive(PartialEq)]
struct Run {
    outputs: Vec<Outputs>,
    states: Vec<Vec<f32>>,
}

impl Run {
    fn assert_same(&self, other: &Self, what: &str) {
        let bits = |v: &Vec<f32>| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (t, (a, b)) in self.outputs.iter().zip(&other.outputs).enumerate() {
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                let part = ["y", "k", "d", "g"][i % 4];
                assert!(bits(a) == bits(b), "{what}: {part} of token {t}");
            }
        }
        assert_eq!(self.outputs.len(), other.outputs.len());
        for (a, b) in self.states.iter().zip(&other.states) {
            assert!(bits(a) == bits(b), "{what}: final state");
        }
    }
}

#[test]
fn chunks_agree_with_single_tokens_to_the_bit() {
    for (value_dim, rate) in [(40, -3.0), (128, -7.0), (7, 1.0)] {
        let model = Model::new(11, shape(value_dim), rate);
        let reference = model.token_by_token(NUM_TOKENS);
        for len in [3, 32, 63, 64] {
            let run = model.run(NUM_TOKENS, |_| (ChainInTree::chain(len), len));
            run.assert_same(&reference, &format!("chunks of {len}"));
        }
        // Chunks of which a part is accepted, as in chain speculation.
        let mut numbers = Numbers::new(5, 5);
        let run = model.run(NUM_TOKENS, |_| {
            let len = 1 + numbers.below(64);
            (ChainInTree::chain(len), 1 + numbers.below(len))
        });
        run.assert_same(&reference, "accepted prefixes");
    }
}

#[test]
fn chunks_may_end_around_every_anchor() {
    let model = Model::new(12, shape(16), -4.0);
    let reference = model.token_by_token(NUM_TOKENS);
    for offset in [31, 32, 33, 1] {
        let run = model.run(NUM_TOKENS, |len| {
            let to_edge = 32 - (len + 32 - offset % 32) % 32;
            (
                ChainInTree::chain(64),
                if len == 0 { offset } else { to_edge },
            )
        });
        run.assert_same(&reference, &format!("chunks ending at 32 n + {offset}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn branches_of_trees_agree_with_single_tokens_to_the_bit(seed: u64, rate in -7.0_f32..2.0) {
        let model = Model::new(seed, shape(24), rate);
        let num_tokens = 330;
        let reference = model.token_by_token(num_tokens);
        let mut numbers = Numbers::new(seed, 1 << 40);
        let run = model.run(num_tokens, |_| {
            let chain_len = 1 + numbers.below(40);
            let num_others = numbers.below(40);
            let tree = ChainInTree::random(&mut numbers, chain_len, num_others);
            (tree, 1 + numbers.below(chain_len))
        });
        run.assert_same(&reference, "random trees");
    }
}

#[test]
fn batch_mates_and_slots_change_nothing() {
    let model = Model::new(13, shape(24), -3.0);
    let other = Model::new(14, shape(24), -3.0);
    let reference = model.token_by_token(200);
    let mut cache = model.cache(3);
    let mut numbers = Numbers::new(3, 3);
    let mut mate_tokens = 0;
    for reuse in 0..2 {
        cache.reset(2);
        let mut outputs = vec![];
        while outputs.len() < 200 {
            let len = outputs.len();
            let num_rows = (1 + numbers.below(20)).min(200 - len);
            let rows: Vec<Input> = (len..len + num_rows).map(|p| model.token(p)).collect();
            let mate_rows: Vec<Input> =
                (0..1 + numbers.below(30)).map(|p| other.token(p)).collect();
            let (chain, mate) = (
                ChainInTree::chain(num_rows),
                ChainInTree::chain(mate_rows.len()),
            );
            let pass = model.pass(
                &mut cache,
                &[(0, &mate.parents, &mate_rows), (2, &chain.parents, &rows)],
            );
            let first = mate_rows.len();
            model.commit(&mut cache, 0, &pass, &mate.chain);
            mate_tokens += mate_rows.len();
            let own: Vec<usize> = (first..first + num_rows).collect();
            model.commit(&mut cache, 2, &pass, &own);
            outputs.extend(pass.outputs[first..].iter().cloned());
        }
        assert_eq!(cache.slots[0].committed_len, mate_tokens);
        let states = (0..NUM_LAYERS)
            .map(|layer| cache.final_state(layer, 2, 200).unwrap())
            .collect();
        Run { outputs, states }.assert_same(&reference, &format!("beside a mate, use {reuse}"));
    }
}

#[test]
fn siblings_do_not_reach_each_other() {
    let model = Model::new(15, shape(24), -3.0);
    for committed in [0, 1, 2, 31, 64, 95, 96, 300] {
        let mut numbers = Numbers::new(committed as u64, 9);
        let tree = ChainInTree::random(&mut numbers, 12, 30);
        let run = |changed: bool| {
            let mut cache = model.cache(1);
            cache.reset(0);
            while cache.slots[0].committed_len < committed {
                let len = cache.slots[0].committed_len;
                let chain = ChainInTree::chain((committed - len).min(64));
                let rows: Vec<Input> = (0..chain.chain.len())
                    .map(|i| model.token(len + i))
                    .collect();
                let pass = model.pass(&mut cache, &[(0, &chain.parents, &rows)]);
                model.commit(&mut cache, 0, &pass, &chain.chain);
            }
            let inputs: Vec<Input> = (0..tree.parents.len())
                .map(|row| {
                    let on_chain = tree.chain.contains(&row);
                    let part =
                        (1 << 50) + row as u64 + if changed && !on_chain { 1 << 20 } else { 0 };
                    model.input(part)
                })
                .collect();
            let pass = model.pass(&mut cache, &[(0, &tree.parents, &inputs)]);
            model.commit(&mut cache, 0, &pass, &tree.chain);
            let states = (0..NUM_LAYERS)
                .map(|layer| {
                    cache
                        .final_state(layer, 0, committed + tree.chain.len())
                        .unwrap()
                })
                .collect();
            let outputs = tree
                .chain
                .iter()
                .map(|&row| pass.outputs[row].clone())
                .collect();
            let others = (0..tree.parents.len())
                .filter(|row| !tree.chain.contains(row))
                .map(|row| pass.outputs[row].clone())
                .collect::<Vec<_>>();
            (Run { outputs, states }, others)
        };
        let ((a, a_others), (b, b_others)) = (run(false), run(true));
        assert!(a_others.iter().zip(&b_others).all(|(a, b)| a[0] != b[0]));
        a.assert_same(&b, &format!("siblings changed at {committed}"));
    }
}

#[test]
fn results_follow_the_sequential_recurrence() {
    for (rate, value_dim) in [(-7.0, 24), (-2.0, 40), (0.0, 128), (3.0, 7)] {
        let model = Model::new(16, shape(value_dim), rate);
        for num_tokens in [1, 2, 3, 300] {
            let (ys, state) = model.oracle(num_tokens);
            let run = model.run(num_tokens, |_| (ChainInTree::chain(20), 20));
            let mut worst = 0.0_f64;
            for (outputs, want) in run.outputs.iter().zip(&ys) {
                for (&got, want) in outputs[0].iter().zip(want) {
                    worst = worst.max((f64::from(got) - want).abs());
                }
            }
            for (&got, want) in run.states[0].iter().zip(&state) {
                worst = worst.max((f64::from(got) - want).abs());
            }
            assert!(worst < 5e-5, "A_log {rate}, {num_tokens} tokens: {worst:e}");
        }
    }
}

#[test]
fn prompts_longer_than_a_path_are_their_tokens_one_by_one() {
    let model = Model::new(23, shape(40), -2.0);
    let num_tokens = 333;
    let want = model.token_by_token(num_tokens);
    for (first, chunk) in [(0, 256), (1, 65), (31, 128), (60, 150), (100, 233)] {
        let mut cache = model.cache(2);
        // What another request left in the slot must not matter: a pass that failed between layers, for one.
        model.prompt(&mut cache, 1, 200, 1);
        cache.reset(1);
        let mut outputs = vec![];
        while outputs.len() < num_tokens {
            let num_rows = match outputs.len() {
                0 if first > 0 => first,
                len => chunk.min(num_tokens - len),
            };
            let pass = model.prompt(&mut cache, 1, num_rows, NUM_LAYERS);
            let rows: Vec<usize> = (0..num_rows).collect();
            model.commit(&mut cache, 1, &pass, &rows);
            outputs.extend(pass.outputs);
        }
        let states = (0..NUM_LAYERS)
            .map(|layer| cache.final_state(layer, 1, num_tokens).unwrap())
            .collect();
        let run = Run { outputs, states };
        run.assert_same(&want, &format!("{first} tokens, then {chunk} at a time"));
    }
}

#[test]
fn paths_beyond_a_pass_and_foreign_rows_are_refused() {
    let model = Model::new(17, shape(16), 0.0);
    let mut cache = model.cache(1);
    assert!(cache.prepare(&model.device, 0, 63).is_ok());
    assert!(matches!(
        cache.prepare(&model.device, 0, 64),
        Err(KernelError::PathTooLong {
            expected: 64,
            got: 65
        })
    ));
    let tail = GdnTail::new(&model.device, &model.shape, 2).unwrap();
    let qkv: Buffer<f32> = model
        .device
        .try_alloc(2 * model.shape.conv_channels())
        .unwrap();
    let mut rows = PlacedRows::default();
    rows.push(0, 0, &[], [2]).unwrap();
    let tails = [(&qkv, &tail); NUM_LAYERS];
    assert!(matches!(
        cache.append(&model.device, &rows, &tails),
        Err(KernelError::BufferTooShort {
            argument: "tail",
            ..
        })
    ));
}
