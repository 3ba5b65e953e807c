"""``deepspeed_finetune.py`` with every configuration, against the same script without DeepSpeed."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
import transformers

from tests.interop import finetunes

transformers.logging.set_verbosity_error()
folder, script = Path(sys.argv[1]), Path(sys.argv[2])
FLAGS = (
    "--per_device_train_batch_size 1 --evaluation_strategy no --save_strategy steps "
    "--save_steps 3000 --save_total_limit 1 --learning_rate 1e-2 --weight_decay 0. "
    "--lr_scheduler_type cosine --seed 1234 --logging_steps 1 --report_to none "
    "--disable_tqdm True --use_cpu True --max_steps 5 "
)
RATE = 0.01
COUNT = "--gradient_accumulation_steps 2 "


def run(name, config=None, more="", rise=0.03, bf16=False):
    """Run the script with a configuration, or without."""
    output = folder / name.replace(" ", "-")
    flags = f"{FLAGS}{more} --warmup_ratio {rise} --bf16 {bf16} --output_dir {output}".split()
    flags += ["--model_name_or_path", str(folder / "model")]
    flags += ["--data_path", str(folder / "data.json")]
    if config is not None:
        # Each rank writes a file of its own.
        path = folder / f"{name} {dist.get_rank() if dist.is_initialized() else 0}.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        flags += ["--deepspeed", str(path)]
    return finetunes.run(script, flags, output)


# Plain runs come first: the arguments of a run with DeepSpeed count for the whole process.
plain = run("plain")
counted = run("plain accumulation", more=COUNT)
# DeepSpeed's schedules begin at step -1, and count a rise of at least two steps.
with finetunes.with_rates([0.0, 0.0, RATE, RATE, RATE * 2 / 3]):
    falling = run("plain decay")
with finetunes.with_rates([0.0, 0.0, RATE, RATE, RATE]):
    constant = run("plain constant")

parts = finetunes.sections(folder / "disk")
(folder / "disk").mkdir(exist_ok=True)
for others, expected, more, rise, names in (
    ({}, plain, "", 0.03, parts),
    (finetunes.ADAMW, plain, "", 0.03, ("1", "3 host")),
    ({"fp16": {"enabled": False}}, plain, "", 0.03, ("2",)),
    ({"checkpoint": {"load_universal": True}}, plain, "", 0.03, ("2",)),
    ({**finetunes.ADAMW, **finetunes.HALF}, counted, COUNT, 0.03, ("2", "3")),
    (finetunes.DECAY, falling, "", 0.03, ("1",)),
    ({**finetunes.ADAMW, **finetunes.DECAY}, falling, "", 0.03, ("2 host", "3 host")),
    (
        {**finetunes.ADAMW, **finetunes.CONSTANT, **finetunes.SCALED},
        constant,
        "",
        0.4,
        ("3 disk", "2"),
    ),
):
    first = None
    for name in names:
        config = {**finetunes.SIZES, **others, "zero_optimization": parts[name]}
        title = f"{name} {'-'.join(others)}{more[:3]}"
        found = run(title, config, more, rise)
        finetunes.assert_close(found, expected, title)
        first = first or found
        finetunes.assert_same(found, first, title)

# In bf16 the stages have the same bits too; at stage 3 a model is made of rounded weights.
first = None
for name in ("1", "2", "2 host"):
    config = {**finetunes.SIZES, "zero_optimization": parts[name]}
    found = run(f"{name} bf16", config, bf16=True)
    finetunes.assert_close(found, plain, name, 1e-2)
    first = first or found
    finetunes.assert_same(found, first, name)
