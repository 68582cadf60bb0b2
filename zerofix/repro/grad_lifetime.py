"""Trains under ZeRO-2 with gradients larger than the bucket, of three streams."""

MEASURES = "gradients freed while a stream still reads them, ZeRO-2, larger than the bucket"
TOLERANCE = 0.0


def run() -> float:
    from zerofix.repro import _streams

    return _streams.run(
        {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 100}, producers=3
    ).unsafe_frees
