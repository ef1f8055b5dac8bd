//! The rows of one request in a verification pass.

/// Row 0 is the anchor token, every other row a drafted token below its parent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenTree {
    /// Token of each row.
    pub token_ids: Vec<u32>,
    /// Row before each row; `None` for row 0 only. Parents come first.
    pub parents: Vec<Option<usize>>,
    /// Drafted tokens on the path to each row, itself included; 0 for row 0. Row r stands at anchor position + depth.
    pub depths: Vec<usize>,
    /// Sum of log-probabilities from the root, non-increasing along every path (and over rows, when grown best-first).
    pub scores: Vec<f64>,
}

impl TokenTree {
    /// Makes this the tree of plain decoding, the anchor token alone, and keeps the memory.
    pub fn reset(&mut self, anchor_token: u32) {
        self.set_chain(&[anchor_token]);
    }

    /// Makes this the chain of given tokens: a prompt chunk, every node of which is accepted.
    pub fn set_chain(&mut self, token_ids: &[u32]) {
        self.truncate(0);
        self.token_ids.extend_from_slice(token_ids);
        let rows = 0..token_ids.len();
        self.parents
            .extend(rows.clone().map(|row| row.checked_sub(1)));
        self.depths.extend(rows);
        self.scores.resize(token_ids.len(), 0.0);
    }

    /// The row below `parent` that holds `token_id`, if there is one.
    pub fn child(&self, parent: usize, token_id: u32) -> Option<usize> {
        (parent + 1..self.num_rows())
            .find(|&row| self.parents[row] == Some(parent) && self.token_ids[row] == token_id)
    }

    /// Length of the longest branch below the root.
    pub fn max_depth(&self) -> usize {
        self.depths.iter().copied().max().unwrap_or(0)
    }

    /// Number of rows, root included.
    pub fn num_rows(&self) -> usize {
        self.token_ids.len()
    }

    /// Keeps the first `num_rows` rows; what is left is a tree, as parents come first.
    pub fn truncate(&mut self, num_rows: usize) {
        self.token_ids.truncate(num_rows);
        self.parents.truncate(num_rows);
        self.depths.truncate(num_rows);
        self.scores.truncate(num_rows);
    }

    /// Hangs `branches` on the last row, which is their root.
    pub fn graft(&mut self, branches: &Self) {
        let end = self.num_rows() - 1;
        let (depth, score) = (self.depths[end], self.scores[end]);
        let below = |parents: &Option<usize>| parents.map(|parent| end + parent);
        self.token_ids.extend_from_slice(&branches.token_ids[1..]);
        self.parents.extend(branches.parents[1..].iter().map(below));
        let depths = branches.depths[1..].iter();
        self.depths.extend(depths.map(|branch| depth + branch));
        let scores = branches.scores[1..].iter();
        self.scores.extend(scores.map(|branch| score + branch));
    }

    /// Appends a row below `parent` and returns its index.
    pub(super) fn push(&mut self, parent: usize, token_id: u32, score: f64) -> usize {
        self.token_ids.push(token_id);
        self.parents.push(Some(parent));
        self.depths.push(self.depths[parent] + 1);
        self.scores.push(score);
        self.token_ids.len() - 1
    }
}
