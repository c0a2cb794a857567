"""What `--help` shows beside options: the verbs in groups, examples of each, and what an exit status means."""

STATUS = (
    "Exit status: 0 where all is done; 1 where something failed while it worked (a rank, a disk, an endpoint); 2 where "
    "the command line, a file or a model cannot be used, before anything is begun; 130 after Ctrl-C."
)

RUN, CHANGE, MEASURE = "Run a model", "Rewire, fit and train", "Measure and predict"
GROUPS = {
    **dict.fromkeys(("demo", "generate", "chat", "serve", "load"), RUN),
    **dict.fromkeys(("convert", "scan", "fit", "data", "adapt", "train", "quantize", "eval"), CHANGE),
    **dict.fromkeys(("plan", "explore", "list", "doctor", "bench", "trace", "report", "tune"), MEASURE),
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("ladder demo",),
    "generate": (
        'ladder generate --prompt "It was a dark and stormy night"',
        "ladder generate --model DIR --wiring ladder --tp 2 --prompts-file prompts.txt --json",
        "ladder generate --model org/name --temperature 0.8 --top-p 0.9 < question.txt",
    ),
    "chat": ("ladder chat DIR", "ladder chat http://127.0.0.1:8000"),
    "serve": ("ladder serve DIR --tp 2 --port 8000",),
    "load": ("ladder load http://127.0.0.1:8000 --rate 4 --requests 100",),
    "convert": (
        "ladder convert DIR OUT --wiring ladder",
        'ladder convert org/name OUT --wiring "standard:16 ladder:16"',
    ),
    "scan": ("ladder scan DIR --data book.txt --wiring ladder --budget 0.1 --plot scan.png",),
    "fit": ('ladder fit DIR OUT --data TOKENS --wiring "standard:15 ladder:15"',),
    "data": ("ladder data TOKENS book.txt more.jsonl --tokenizer DIR", "ladder data TOKENS book.txt --vocab 4096"),
    "adapt": (
        'ladder adapt DIR OUT --data TOKENS --wiring "standard:15 ladder:15"',
        "ladder adapt DIR OUT --data TOKENS --method lora --lora-rank 32",
    ),
    "train": ("ladder train OUT --recipe 50M --data TOKENS --wiring ladder",),
    "quantize": ("ladder quantize DIR OUT --format int4 --group 64 --calibrate book.txt",),
    "eval": (
        "ladder eval DIR OUT --text book.txt --tokens 20000 --source DIR",
        "ladder eval DIR OUT --text book.txt --source DIR --continuations 256",
        "ladder eval DIR --wiring standard --wiring ladder --task hellaswag --limit 100",
    ),
    "plan": (
        "ladder plan --chip h200 --tp 2,4,8 --batch 1,16,64",
        "ladder plan --model DIR --chip rtx-4090 --tp 2",
        "ladder plan --size llama-3.1-405b --chip h100 --tp 16 --nodes 2 --target-ms 40",
    ),
    "explore": ("ladder explore", "ladder explore --out page.html"),
    "list": ("ladder list", "ladder list links --json"),
    "doctor": ("ladder doctor", "ladder doctor --json"),
    "bench": (
        "ladder bench --preset quick --out bench.jsonl",
        "ladder bench --size llama-3-8b --tp 2 --batch 1 --batch 16",
    ),
    "trace": ("ladder trace --size quick --tp 2 --emulate-link 5ms,10GB/s --batch 1 --context 64 --out trace",),
    "report": ("ladder report bench.jsonl --out report",),
    "tune": ("ladder tune tuned.jsonl --size llama-3-8b --tp 1",),
}
