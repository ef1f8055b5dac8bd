//! Free lists, tables and rings; and poison for whatever no row may see.

use super::*;
use crate::kernels::kv_span::PageTables;

const SHAPES: [KvShape; 2] = [
    KvShape {
        num_kv_heads: 1,
        head_dim: 128,
    },
    KvShape {
        num_kv_heads: 2,
        head_dim: 16,
    },
];

impl KvCache {
    /// Overwrites all keys and values with NaN but those that a row after the committed tokens of `held` may see, a
    /// request's tables and the number of its committed tokens each. `windows` are those of the layers.
    pub(crate) fn poison_unseen(
        &mut self,
        windows: &[Option<usize>],
        held: &[(PageTables<'_>, usize)],
    ) {
        assert_eq!(windows.len(), self.layers.len());
        for (layer, window) in self.layers.iter_mut().zip(windows) {
            let KvShape {
                num_kv_heads,
                head_dim,
            } = layer.shape;
            for pages in [&mut layer.k, &mut layer.v] {
                let values = pages.host_mut();
                let mut poisoned = vec![f32::NAN; values.len()];
                for (tables, committed_len) in held {
                    let first =
                        window.map_or(0, |window| (committed_len + 1).saturating_sub(window));
                    for position in first..*committed_len {
                        let page = tables.of(layer.span)[position / KV_BLOCK] as usize;
                        for head in 0..num_kv_heads {
                            let lane =
                                (page * num_kv_heads + head) * KV_BLOCK + position % KV_BLOCK;
                            let lane = lane * head_dim..(lane + 1) * head_dim;
                            poisoned[lane.clone()].copy_from_slice(&values[lane]);
                        }
                    }
                }
                values.copy_from_slice(&poisoned);
            }
        }
    }
}

/// A cache of the two shapes, the second with a window of `window` positions.
fn cache(num_pages: PerSpan<usize>, window: Option<usize>, rows_ahead: usize) -> KvCache {
    let layout = KvLayout::new([(SHAPES[0], None), (SHAPES[1], window)], rows_ahead);
    KvCache::new(&Device::host(Some(1)).unwrap(), layout, num_pages).unwrap()
}

fn pages(whole: usize, window: usize) -> PerSpan<usize> {
    PerSpan { whole, window }
}

/// Tables of `num_positions` from `cache`.
fn reserved(cache: &mut KvCache, num_positions: usize) -> Option<PerSpan<Vec<u32>>> {
    let mut tables = PerSpan::default();
    cache.reserve(&mut tables, num_positions).then_some(tables)
}

#[test]
fn tables_are_lengthened_all_or_nothing_and_pages_are_distinct() {
    let mut cache = cache(pages(5, 0), None, 0);
    let mut first = reserved(&mut cache, 129).unwrap();
    assert_eq!(first, PerSpan::whole_only(vec![0, 1, 2]));
    assert_eq!(reserved(&mut cache, 129), None);
    assert_eq!(cache.num_free_pages(), pages(2, 0));
    let second = reserved(&mut cache, 128).unwrap();
    assert!(second.whole.iter().all(|page| !first.whole.contains(page)));
    assert!(cache.reserve(&mut first, 192), "room is there already");
    assert!(!cache.reserve(&mut first, 193));
    let released = first.clone();
    cache.release(&mut first);
    assert_eq!(first, PerSpan::default());
    assert_eq!(reserved(&mut cache, 192).unwrap(), released);
    assert_eq!(reserved(&mut cache, 0), Some(PerSpan::default()));
}

#[test]
#[should_panic(expected = "page 1 is released twice")]
fn a_double_release_panics() {
    let mut cache = cache(pages(4, 0), None, 0);
    let mut tables = reserved(&mut cache, 128).unwrap();
    cache.release(&mut tables.clone());
    // Page 0 is somebody's again.
    reserved(&mut cache, 64).unwrap();
    cache.release(&mut tables);
}

#[test]
fn a_ring_holds_the_window_and_what_is_written_ahead() {
    for (window, rows_ahead, expected) in [
        (1, 0, 1),
        (2, 0, 1),
        (65, 0, 1),
        (66, 0, 2),
        (1, 64, 1),
        (2, 64, 2),
        (129, 192, 5),
        (130, 192, 6),
        // Gemma 4 and Muse Glimmer in passes of 64 and 256 rows.
        (1024, 0, 16),
        (1024, 192, 19),
        (2048, 0, 32),
        (2048, 192, 35),
    ] {
        let layout = KvLayout::new([(SHAPES[0], None), (SHAPES[1], Some(window))], rows_ahead);
        assert_eq!(layout.ring_pages(), expected, "{window} {rows_ahead}");
        assert_eq!(layout.num_pages(64_000), pages(1000, expected));
        assert_eq!(layout.num_pages(64), pages(1, 1));
    }
    let whole = KvLayout::new([(SHAPES[0], None)], 192);
    assert_eq!(whole.num_pages(64_000), pages(1000, 0));
    let widest = KvLayout::new([(SHAPES[0], Some(65)), (SHAPES[1], Some(1025))], 0);
    assert_eq!(widest.ring_pages(), 16);
}

#[test]
fn windows_lead_through_their_ring_over_and_over() {
    // Three pages: 129 positions of the window, 63 of rows ahead.
    let mut cache = cache(pages(20, 7), Some(130), 63);
    let mut tables = reserved(&mut cache, 64).unwrap();
    assert_eq!(tables.window, [0]);
    assert!(cache.reserve(&mut tables, 65));
    assert!(cache.reserve(&mut tables, 64 * 8));
    assert_eq!(tables.window, [0, 1, 2, 0, 1, 2, 0, 1]);
    assert_eq!(tables.whole, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(cache.reserve(&mut tables, 64 * 9));
    assert_eq!(tables.window.last(), Some(&2));
    assert_eq!(cache.num_free_pages(), pages(11, 4));
    // Short requests take what they need of the same pool, and none of either where one is short.
    let mut short = reserved(&mut cache, 100).unwrap();
    assert_eq!(cache.num_free_pages(), pages(9, 2));
    assert_eq!(reserved(&mut cache, 64 * 3), None);
    assert_eq!(cache.num_free_pages(), pages(9, 2));
    cache.release(&mut tables);
    cache.release(&mut short);
    assert_eq!(cache.num_free_pages(), pages(20, 7));
}

#[test]
fn pools_hold_every_page_of_every_layer() {
    let mut whole = cache(pages(3, 0), None, 0);
    let page = |cache: &KvCache| cache.layout().page_bytes(4);
    assert_eq!(page(&whole), pages(2 * 4 * 64 * (128 + 32), 0));
    assert_eq!(whole.k(0).len(), 3 * 64 * 128);
    assert_eq!(whole.v(1).len(), 3 * 64 * 32);
    let (k, v) = whole.k_v_mut(1);
    k.upload(&[1.0]).unwrap();
    v.upload(&[2.0]).unwrap();
    let first = |pages: &Buffer<f32>| pages.read_back(1).unwrap()[0];
    assert_eq!((first(whole.k(1)), first(whole.v(1))), (1.0, 2.0));

    let windowed = cache(pages(3, 2), Some(8), 0);
    assert_eq!(page(&windowed), pages(2 * 4 * 64 * 128, 2 * 4 * 64 * 32));
    assert_eq!(
        (windowed.k(0).len(), windowed.v(1).len()),
        (3 * 64 * 128, 2 * 64 * 32)
    );
    assert_eq!(
        (windowed.span(0), windowed.span(1)),
        (KvSpan::Whole, KvSpan::Window)
    );
}
