// The rows of one pass, as `RowPaths` of rust/kernels/paths.rs lays them out: positions, paths, segments and pages.
#pragma once

#include "async_copy.cuh"

// What a row knows besides its position.
struct RowFacts {
    u32 path_start;  // its path in `path_rows`; it ends with the row itself
    u32 segment;
};

// The rows of one request.
struct SegmentFacts {
    u32 slot;
    u32 committed_len;  // the path of each of its rows starts at this position
    u32 first_row;
    u32 num_rows;
    u32 first_page;  // its pages in `pages`, one per 64 committed tokens
    u32 unused[3];
};

struct RowPaths {
    const u32* positions;          // [num_rows]
    const RowFacts* rows;          // [num_rows]
    const SegmentFacts* segments;  // [num_segments], in row order
    const u32* path_rows;
    const u32* pages;
    u32 num_rows;
    u32 num_segments;
};
