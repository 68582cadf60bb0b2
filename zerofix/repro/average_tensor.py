"""Trains under ZeRO-2 with gradients of three streams."""

MEASURES = "largest weight error against one stream, ZeRO-2, gradients of three virtual streams"
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro import _streams

    return max(
        _streams.run(
            {"stage": 2, "overlap_comm": overlap, "reduce_bucket_size": 300}, producers=3
        ).error
        for overlap in (True, False)
    )
