"""Trains under ZeRO-3 with gradients of one side stream."""

MEASURES = "largest weight error against one stream, ZeRO-3, gradients of one virtual side stream"
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro import _streams

    return _streams.run(
        {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 300}, producers=1
    ).error
