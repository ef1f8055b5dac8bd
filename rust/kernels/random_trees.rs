//! Test inputs: hashed numbers, and random trees that contain a given chain.

/// A deterministic stream of numbers (splitmix64).
#[derive(Clone, Debug)]
pub(crate) struct Numbers(u64);

impl Numbers {
    /// The stream of a seed; different parts give unrelated streams.
    pub(crate) fn new(seed: u64, part: u64) -> Self {
        Self(seed ^ part.wrapping_mul(0xd134_2543_de82_ef95))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// An index below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Uniform in -1..1.
    pub(crate) fn signed(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `len` values of [`signed`](Self::signed) times `scale`.
    pub(crate) fn vector(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.signed() * scale).collect()
    }
}

/// A segment in which the rows `chain` follow each other from the root, among other rows.
#[derive(Clone, Debug)]
pub(crate) struct ChainInTree {
    /// Parent of each row.
    pub(crate) parents: Vec<Option<usize>>,
    /// Rows of the chain, in position order.
    pub(crate) chain: Vec<usize>,
}

impl ChainInTree {
    /// A chain of `chain_len` rows alone.
    pub(crate) fn chain(chain_len: usize) -> Self {
        Self {
            parents: (0..chain_len).map(|i| i.checked_sub(1)).collect(),
            chain: (0..chain_len).collect(),
        }
    }

    /// A chain of `chain_len` rows shuffled among `num_others` rows that hang anywhere, beside the root included, on
    /// paths of at most 64 rows.
    pub(crate) fn random(numbers: &mut Numbers, chain_len: usize, num_others: usize) -> Self {
        let mut tree = Self {
            parents: vec![],
            chain: vec![],
        };
        let mut depths: Vec<usize> = vec![];
        let mut others_left = num_others;
        while tree.chain.len() < chain_len || others_left > 0 {
            let chain_left = chain_len - tree.chain.len();
            let extend = numbers.below(chain_left + others_left) < chain_left;
            let parent = if extend {
                tree.chain.last().copied()
            } else {
                numbers.below(depths.len() + 1).checked_sub(1)
            };
            let depth = parent.map_or(1, |p| depths[p] + 1);
            if extend {
                tree.chain.push(depths.len());
            } else {
                others_left -= 1;
                if depth > 64 {
                    continue;
                }
            }
            tree.parents.push(parent);
            depths.push(depth);
        }
        tree
    }
}
