"""BF16_Optimizer reduces its sums before the last micro-batch is in them."""

from __future__ import annotations

from zerofix.fix import Edit, Fix, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerofix.config import Training


def _hit_by(training: Training) -> bool | str:
    late = not training.bf16("immediate_grad_update")
    return training.bf16_optimizer and late and "with several ranks"


FIX = Fix(
    name="bf16_optimizer",
    title="BF16_Optimizer reduces the last micro-batch of a step too",
    symptom=(
        "bf16 with ZeRO-1 and data_types.grad_accum_dtype fp32: each rank updates its part of the "
        "weights from the last micro-batch of its own, without gradient accumulation from its own "
        "batches alone."
    ),
    cause=(
        "Since 0.18.3 the engine reduces the gradients at the end of a backward, and adds those "
        "of this backward to the sums after that."
    ),
    upstream=(),
    introduced="0.18.5",
    fixed="0.19.0",
    hit_by=_hit_by,
    targets=(
        Target(
            "deepspeed.runtime.engine:DeepSpeedEngine._backward_epilogue",
            Edit(
                find="""
                if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
                    self.allreduce_gradients()
                if isinstance(self.optimizer, ZeROOptimizer):
                    self.optimizer.backward_epilogue()
                    self.optimizer.exit_backward()
                """,
                put="""
                if isinstance(self.optimizer, BF16_Optimizer):
                    self.optimizer.backward_epilogue()
                if self.enable_backward_allreduce and not self.inside_no_sync_ctxt:
                    self.allreduce_gradients()
                if isinstance(self.optimizer, ZeROOptimizer):
                    if not isinstance(self.optimizer, BF16_Optimizer):
                        self.optimizer.backward_epilogue()
                    self.optimizer.exit_backward()
                """,
            ),
        ),
    ),
    limits=(
        "0.17.6 to 0.18.4 never take BF16_Optimizer: for this configuration they have one of "
        "theirs that partitions nothing, and with which 0.18.3 and 0.18.4 do not train at all. "
        "Another optimizer could not read the checkpoints of that run, so zerofix leaves this as "
        "it is."
    ),
)
