"""Private models that are cut into stages, one in each process."""

from flash_clipping.engine import wings
from flash_clipping.pipelines.optimizer import PipelineFlashDPOptimizer, pipeline_group
from flash_clipping.pipelines.schedule import PrivateSchedule

__all__ = ["PipelineFlashDPOptimizer", "PrivateSchedule"]

wings.pipeline_group = pipeline_group
wings.stage_optimizer = PipelineFlashDPOptimizer
