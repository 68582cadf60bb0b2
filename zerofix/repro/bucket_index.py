"""Trains under ZeRO-2 with overlap_comm and gradients of one stream."""

MEASURES = "largest weight error against no overlap, ZeRO-2 with overlap_comm, virtual streams"
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro import _streams

    return _streams.run(
        {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 300}, producers=1
    ).error
