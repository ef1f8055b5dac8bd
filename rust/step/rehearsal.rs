//! Forwards of every size that decode steps come in, before the first request: a GPU captures their launches then, and
//! no step has to. What they compute goes nowhere.

use crate::error::Result;
use crate::kernels::kv_span::PageTables;
use crate::kernels::paths::row_bucket;
use crate::kernels::tree_attention::{KV_BLOCK, KV_SPLIT};
use crate::kernels::w12_matmul::WeightView;

use super::decode_step::ModelPair;

/// Contexts of up to so many splits of attention are rehearsed; longer ones are captured when they come, once for
/// every doubling.
const MAX_SPLITS: usize = 4;
/// Forwards of one size: the first sees the launches, the second captures them.
const NUM_FORWARDS: usize = 2;

/// Runs the target over chains for one request (a stock engine takes nothing else) of up to `most_rows` rows, with Q
/// views through both, and a stock engine's LM head over as many rows.
///
/// # Errors
/// Whatever a kernel refuses.
pub fn rehearse_forwards(
    pair: &mut ModelPair,
    most_rows: usize,
    with_q_views: bool,
    max_model_len: usize,
) -> Result<()> {
    let views: &[WeightView] = match with_q_views {
        false => &[WeightView::Exact],
        true => &[WeightView::Exact, WeightView::Q],
    };
    let mut num_rows = 1;
    while num_rows <= row_bucket(most_rows) {
        for num_splits in [0, 1, 2, MAX_SPLITS] {
            let committed_len = num_splits * KV_SPLIT;
            if committed_len >= max_model_len {
                continue;
            }
            for view in views {
                for _ in 0..NUM_FORWARDS {
                    let num_rows = pair.paths.padded_rows(num_rows);
                    forward(pair, *view, num_rows, committed_len)?;
                }
            }
        }
        num_rows = row_bucket(num_rows + 1);
    }
    if pair.target.weights().stock.is_some() {
        // Its head goes by the exact number of rows, of which the last step of a request may have fewer than others,
        // and each is tuned when it is first seen.
        for num_rows in 1..=most_rows as u32 {
            let rows: Vec<u32> = (0..num_rows).collect();
            pair.target.logits(&pair.device, &rows)?;
        }
    }
    Ok(())
}

fn forward(
    pair: &mut ModelPair,
    view: WeightView,
    num_rows: usize,
    committed_len: usize,
) -> Result<()> {
    let ModelPair {
        device,
        target,
        caches,
        paths,
        ..
    } = pair;
    paths.clear();
    let pages = vec![0; committed_len.div_ceil(KV_BLOCK)];
    let tables = PageTables {
        whole: &pages,
        window: match caches.kv().layout().ring_pages() {
            0 => &[],
            _ => &pages,
        },
    };
    let chain: Vec<_> = (0..num_rows).map(|row| row.checked_sub(1)).collect();
    paths.push_segment(0, committed_len, tables, &chain)?;
    paths.finish(device)?;
    target.forward(device, view, &vec![0; num_rows], paths, caches, None)
}
