"""Benchmarks for any model: samples on disk, tables with intervals, comparisons.

    python eval.py --model smollm2-135m --benchmarks humaneval,mbpp,starter --out results/base
    python eval.py --model runs/NAME/model --benchmarks leetcode,rlla,apibank --out results/trained
    python eval.py --model references --benchmarks leetcode --out results/references     the ceiling: references as replies
    python eval.py --compare results/base results/trained runs/NAME --out results        side by side, with plots

Greedy by default. What is there is kept: a run that was stopped goes on where it stopped, --rescore judges the same replies
again. FOLDER/BENCHMARK/samples.jsonl has a record for each reply, summary.json the measures, FOLDER/table.md the tables.
"""

import argparse
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import config
import envs
import envs.rows
import policy
import report
from logs import read_jsonl, replace
from rewards import code
from rollout import Rollout, collect, encode, replay, score
from sampler import SamplerError, bf16_pays, choose, make, stream

# name: environment, its arguments, split, what it is
BENCHMARKS = {
    "starter": ("leetcode", {"data": "starter"}, "test", "the 42 held-out starter problems"),
    "leetcode": ("leetcode", {"data": ("leetcode/LeetCodeDataset-v0.3.1-test.jsonl.gz", "LeetCodeDataset-v0.3.1-test.jsonl")},
                 "test", "LeetCodeDataset v0.3.1, 228"),
    "humaneval": ("envs.humaneval:HumanEval", {}, "test", "HumanEval, 164"),
    "mbpp": ("envs.mbpp:MBPP", {}, "all", "MBPP, all 974 problems"),
    "mbpp_test": ("envs.mbpp:MBPP", {}, "test", "MBPP, task ids 11 to 510"),
    "mbpp_sanitized": ("envs.mbpp:MBPP", {"data": "sanitized"}, "all", "MBPP sanitized, 427"),
    "livecodebench": ("envs.livecodebench:LiveCodeBench", {}, "test",
                      "LiveCodeBench, the v6 slice: livecodebench.release=v6, v4_v6, release_v5 and so on"),
    "rlla": ("rlla", {"data": ("rlla_4k/test.parquet", "rlla/test.parquet", "rlla/rlla_test.jsonl.gz")}, "test",
             "RLLA-4K's test split, 80"),
    "rlla_tiny": ("rlla", {"data": "tiny"}, "test", "100 held-out rows made from data/tools.json"),
    "apibank": ("apibank", {}, "test", "API-Bank v1 to v3: apibank.judge=execution apibank.root=FOLDER for the paper's judge"),
    "agentdojo": ("agentdojo", {"max_calls": 1, "max_tool_chars": 2048}, "test", "AgentDojo, the published 411 cases"),
}
HUB = {"leetcode": "newfacade/LeetCodeDataset"}     # where none of its files is here
SOURCES = {"mbpp": "mbpp of google-research/google-research", "rlla": "dataset/rlla_4k of qiancheng0/ToolRL",
           "apibank": "benchmarks/API-Bank of qiancheng0/ToolRL"}
# Keys of config.toml that mean something here; the length, temperature and number of replies are options of the command line.
KEYS = ("model.device", "model.chat_template_kwargs", "sampler.engine", "sampler.dtype", "sampler.batch_size",
        "sampler.max_response_tokens", "sampler.kv_cache_gb", "sampler.gpu_memory_utilization", "sampler.sleep", "train.seed",
        "train.threads")


def main(argv: list[str] | None = None) -> int:
    lines = "\n".join(f"  {name:15} {about}" for name, (_, _, _, about) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"benchmarks (data: under $CORRGRPO_DATA; leetcode, humaneval and livecodebench then on the hub):\n{lines}")
    parser.add_argument("--model", metavar="NAME", help="a folder in Hugging Face format, a name, or: references")
    parser.add_argument("--benchmarks", default="starter", metavar="A,B", help="which, separated by commas")
    parser.add_argument("--out", default="results", metavar="FOLDER", help="where the results go (default: results)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="replies for each task (default: 1, greedy)")
    parser.add_argument("--temperature", type=float, help="default: 0 for one sample, else 1")
    parser.add_argument("--max-new-tokens", type=int, default=2048, metavar="N", help="length of a reply (default: 2048)")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N tasks of each benchmark")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="paired rounds of efficiency (default: 8; 0: none)")
    parser.add_argument("--rescore", action="store_true", help="judge the replies on disk again; no model is loaded")
    parser.add_argument("--compare", nargs="+", metavar="RUN", help="tables and plots of results and of training runs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="a benchmark's argument (leetcode.timeout=15) or a key of config.toml (sampler.batch_size=32)")
    args = parser.parse_intermixed_args(argv)
    try:
        return compare(args) if args.compare else evaluate(args)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except SamplerError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        return 130


def evaluate(args: argparse.Namespace) -> int:
    names = list(dict.fromkeys(name.strip() for name in args.benchmarks.split(",")))
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise ValueError(f"--benchmarks: there is no {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if not args.model and not args.rescore:
        raise ValueError("--model is missing: a folder, a name or references (or --rescore, or --compare RUN ...)")
    if args.samples < 1 or args.max_new_tokens < 1:
        raise ValueError("--samples and --max-new-tokens must be at least 1")
    if args.limit < 0 or args.rounds < 0 or (args.temperature or 0) < 0:
        raise ValueError("--limit, --rounds and --temperature must not be negative")
    for override in args.overrides:
        section, _, rest = override.partition(".")
        if section not in ("env", *BENCHMARKS) and (key := override.partition("=")[0].strip()) not in KEYS:
            config.read(None, None, [override])         # a key that there is not has an error of its own
            raise ValueError(f"{key} changes nothing here; eval.py takes {', '.join(KEYS)}, and options (--help)")
        if section == "env" or (section in BENCHMARKS and section not in names):
            raise ValueError(f"{override}: an argument of a benchmark in --benchmarks is NAME.key=value, as {names[0]}.{rest}")
    temperature = args.temperature if args.temperature is not None else 0.0 if args.samples == 1 else 1.0
    if args.samples > 1 and temperature == 0:
        raise ValueError(f"--samples {args.samples} at --temperature 0 would be {args.samples} times the same reply")
    ours = [o for o in args.overrides if o.partition(".")[0] not in BENCHMARKS]
    cfg = config.read(None, None, ours)
    jobs = {name: benchmark(name, [o for o in args.overrides if o.startswith(f"{name}.")], args.limit) for name in names}
    source = {"model": args.model, "weights": fingerprint(args.model), "samples": args.samples, "temperature": temperature,
              "max_new_tokens": args.max_new_tokens, "max_response_tokens": cfg.sampler.max_response_tokens,
              "chat_template_kwargs": cfg.model.chat_template_kwargs, "seed": cfg.train.seed, "dtype": cfg.sampler.dtype,
              "engine": cfg.sampler.engine}
    for file in Path(args.out).glob("*/settings.json") if not args.rescore else ():
        stored = read_settings(file.parent)     # replies of two kinds never share a file, those of two models no table's row
        for key in source if file.parent.name in names else ("model", "weights"):
            if stored.get(key) != source[key]:
                raise ValueError(f"{file.parent} holds samples with {key} = {stored.get(key)!r}, not {source[key]!r}: choose "
                                 "another --out")
    for name in names:
        same_tasks(Path(args.out) / name, jobs[name], args.rescore)
    writer = None
    if args.model == "references":
        without = [name for name, job in jobs.items() if not hasattr(job.env, "reference")]
        if without:
            raise ValueError(f"--model references: {', '.join(without)} has no reference replies")
    elif not args.rescore:
        policy.find(args.model)
        choose(cfg.sampler.engine, cfg.model.device)
    for name, job in jobs.items():
        folder = Path(args.out) / name
        file = folder / "samples.jsonl"
        print(f"{name}: {len(job.tasks)} tasks, {args.samples} {'greedy' if temperature == 0 else 'sampled'} each; {folder}")
        if args.rescore:
            rescore(job, file, cfg.sampler.batch_size)
            replace(folder / "settings.json", json.dumps(read_settings(folder) | {"arguments": job.arguments}, indent=1))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            replace(folder / "settings.json", json.dumps(source | {"arguments": job.arguments}, indent=1))
            if writer is None:
                writer = references if args.model == "references" else model_writer(args, cfg, temperature)
            sample(job, file, writer, args.samples, max(1, cfg.sampler.batch_size // args.samples))
        samples = [s for s in read_jsonl(file) if s["id"] in job.ids]
        summary = {"benchmark": name, **read_settings(folder)} | report.summarize(job.env, samples, cfg.train.seed)
        if name in ("leetcode", "starter") and args.rounds:
            summary["measures"] |= efficiency(job, samples, args.rounds, folder / "efficiency.jsonl")
        summary["notes"] = getattr(job.env, "notes", {})
        replace(folder / "summary.json", json.dumps(summary, indent=1, default=str))
    runs = {Path(args.out).resolve().name: report.read_run(Path(args.out))[0]}
    text = report.table(runs)
    replace(Path(args.out) / "table.md", text)
    print(f"\n{text}\n{Path(args.out) / 'table.md'}")
    return 0


def benchmark(name: str, overrides: list[str], limit: int) -> SimpleNamespace:
    """Environment and tasks; raises ValueError that says where a missing data set comes from."""
    env_name, arguments, split, _ = BENCHMARKS[name]
    given = {f"env.{key}={json.dumps(value)}" for key, value in arguments.items()}
    own = [f"env.{o.removeprefix(f'{name}.')}" for o in overrides]
    if isinstance(arguments.get("data"), tuple):        # the first that is here
        files = [file for file in arguments["data"] if envs.rows.find_file(file)]
        given = {f"env.data={files[0] if files else HUB.get(name, arguments['data'][0])}"}
    cfg = config.read(None, None, [f"env.name={env_name}", *given, *own])
    env_class = envs.find(env_name)
    try:
        env = env_class(**config.environment_arguments(cfg, env_class))
        tasks = env.tasks(cfg.env.split if any(o.startswith("env.split=") for o in own) else split)
    except (ValueError, OSError, ImportError) as e:
        come = next((f" ({where} on GitHub)" for which, where in SOURCES.items() if name.startswith(which)), "")
        hint = f". Name a file with {name}.data=FILE, or put the data{come} under $CORRGRPO_DATA" if "file" in str(e) else ""
        raise ValueError(f"{name}: {str(e).replace('env.', f'{name}.')}{hint}") from None
    tasks = tasks[: limit or None]
    limits = {"timeout": cfg.env.timeout, "memory_mb": cfg.env.memory_mb} if env_name == "leetcode" else {}
    return SimpleNamespace(name=name, env=env, tasks=tasks, ids={task.id for task in tasks}, limits=limits,
                           arguments=own)


def fingerprint(model: str | None) -> str | None:
    """Of a local folder's weights, since another training may have written to it; None for other names."""
    files = sorted(file for kind in ("*.safetensors", "*.bin") for file in Path(model).glob(kind)) if model else []
    digest = hashlib.sha256()
    for file in tqdm(files, desc="fingerprint of the weights", unit="file", leave=False, disable=None):
        with open(file, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:16] if files else None


def read_settings(folder: Path) -> dict:
    file = folder / "settings.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def same_tasks(folder: Path, job: SimpleNamespace, rescore: bool) -> None:
    """Replies to two data sets, or judged in two ways, never share a file."""
    stored = read_settings(folder)
    if rescore:
        if not (folder / "samples.jsonl").is_file():
            raise ValueError(f"--rescore: there are no samples in {folder}")
        return
    prompts = {task.id: task.messages for task in job.tasks}
    if any(prompts.get(s["id"], s["prompt"]) != s["prompt"] for s in read_jsonl(folder / "samples.jsonl")):
        raise ValueError(f"{folder} holds replies to other prompts than {job.name}'s now: choose another --out")
    if stored and stored.get("arguments", job.arguments) != job.arguments:
        raise ValueError(f"{folder} was judged with {stored['arguments']}, not {job.arguments}: judge it again with --rescore, "
                         "or choose another --out")


# ---------------------------------------------------------------- replies


def references(env, tasks: list[tuple[int, envs.Task]], n: int) -> list[Rollout]:
    return [replay(env, task, i, [env.reference(task)]) for i, task in tasks for _ in range(n)]


def model_writer(args: argparse.Namespace, cfg: SimpleNamespace, temperature: float):
    """write(env, [(number, task)], n) -> rollouts in order, n of each task, with the model loaded once."""
    torch.set_num_threads(cfg.train.threads or code.cores())
    device = torch.device("cuda" if cfg.model.device != "cpu" and torch.cuda.is_available() else "cpu")
    if cfg.sampler.dtype == "auto":
        cfg.sampler.dtype = "bfloat16" if bf16_pays(device) else "float32"
    source = policy.source(args.model)
    model, tokenizer = policy.load(source, cfg.model.chat_template_kwargs)
    sampler, engine = make(cfg, model.to(device), tokenizer, source)
    sampler.sync(model)
    context = sampler.context
    print(f"{args.model}: {model.num_parameters() / 1e6:.0f}M parameters on {device}, sampling in "
          f"{cfg.sampler.dtype} with {engine}", flush=True)
    if given := tokenizer.init_kwargs.get("chat_template_kwargs"):
        print(f"the chat template is given {given}", flush=True)

    def write(env, tasks: list[tuple[int, envs.Task]], n: int) -> list[Rollout]:
        encoded = [(task, encode(tokenizer, task)) for _, task in tasks]
        room = context - max(len(prompt) for _, prompt in encoded)
        if room < args.max_new_tokens and len(tasks) > 1:       # a long prompt shortens nobody else's reply
            return [r for pair in tasks for r in write(env, [pair], n)]
        if room < 1:                                            # it does not fit: an empty reply, judged as it stands
            return [replay(env, tasks[0][1], 0, [""]) for _ in range(n)]
        return collect(env, sampler, tokenizer, encoded, n, seeds=[stream(cfg.train.seed, i) for i, _ in tasks],
                       max_new_tokens=min(args.max_new_tokens, room), temperature=temperature, max_tokens=context,
                       max_response_tokens=cfg.sampler.max_response_tokens)
    return write


def sample(job: SimpleNamespace, file: Path, write, n: int, size: int) -> None:
    """Fill samples.jsonl, batch by batch: what is written stays, a batch that is whole is not sampled again. Batches are cut
    the same way every time, since rounding depends on who shares one."""
    kept = [s for s in read_jsonl(file) if s["error"] is None]          # what could not be scored is tried again
    done = {(s["id"], s["sample"]) for s in kept}
    whole = "".join(json.dumps(s) + "\n" for s in kept)
    if file.exists() and file.read_text(encoding="utf-8") != whole:     # a line that a kill cut off
        replace(file, whole)
    batches = [list(enumerate(job.tasks))[i : i + size] for i in range(0, len(job.tasks), size)]
    with tqdm(total=len(job.tasks) * n, desc=job.name, unit="reply", disable=None) as bar:
        for batch in batches:
            if not all((task.id, j) in done for _, task in batch for j in range(n)):
                rollouts = write(job.env, batch, n)
                score(job.env, rollouts)
                lines = [json.dumps(record(job.env, r, k % n), default=str) + "\n"
                         for k, r in enumerate(rollouts) if (r.task.id, k % n) not in done]
                with open(file, "a", encoding="utf-8") as f:
                    f.write("".join(lines))
                transcripts(job.env, rollouts, n, file.parent)
            bar.update(len(batch) * n)


def rescore(job: SimpleNamespace, file: Path, size: int) -> None:
    """Judge the replies of samples.jsonl again, `size` at once; the file changes when all are judged."""
    old, tasks = read_jsonl(file), {task.id: task for task in job.tasks}
    kept = [s for s in old if s["id"] in tasks]
    new = [s for s in old if s["id"] not in tasks]
    with tqdm(total=len(kept), desc=job.name, unit="reply", disable=None) as bar:
        for batch in (kept[i : i + size] for i in range(0, len(kept), size)):
            rollouts = [replay(job.env, tasks[s["id"]], i, s["replies"]) for i, s in enumerate(batch)]
            score(job.env, rollouts)
            new += [s | {key: value for key, value in record(job.env, r, s["sample"]).items()
                         if key in ("rewards", "metrics", "error")} for s, r in zip(batch, rollouts)]
            bar.update(len(batch))
    replace(file, "".join(json.dumps(s, default=str) + "\n" for s in new))


def record(env, r: Rollout, number: int) -> dict:
    return {"id": r.task.id, "sample": number, "prompt": r.task.messages, "replies": r.replies, "tokens": sum(r.trained),
            "finish_reason": r.finish_reason, "rewards": r.score.rewards if r.score else {},
            "metrics": r.score.metrics if r.score else {}, "error": r.error}


def transcripts(env, rollouts: list[Rollout], n: int, folder: Path) -> None:
    """One file an episode, for people, where the environment writes such; n of each task, one after the other."""
    if hasattr(env, "transcript"):
        (folder / "transcripts").mkdir(exist_ok=True)
        for k, r in enumerate(rollouts):
            if r.episode is not None:
                name = "".join(c if c.isalnum() or c in "-_." else "_" for c in r.task.id) + (f"-{k % n}" if n > 1 else "")
                with contextlib.suppress(Exception):        # a transcript is worth no verdict
                    replace(folder / "transcripts" / (name + env.transcript_suffix), env.transcript(r.episode))


def efficiency(job: SimpleNamespace, samples: list[dict], rounds: int, file: Path) -> dict:
    """Of the first replies that pass, the share strictly faster than the reference; the mean of the rounds, low and high the
    lowest and the highest round. A row of `file` is a round; rounds of the same programs are not run again."""
    rows = {task.id: task.data for task in job.tasks}
    passing = [s for s in samples if s["sample"] == 0 and s["error"] is None and s["rewards"]["pass"] == 1]
    pairs = [(rows[s["id"]], code.extract_code(s["replies"][0], rows[s["id"]]["entry_point"]), rows[s["id"]]["completion"])
             for s in passing]
    ids = [s["id"] for s in passing]
    programs = [[row["prompt"], row["test"], *codes] for row, *codes in pairs]
    key = hashlib.sha256(json.dumps([ids, programs, job.limits]).encode()).hexdigest()[:16]
    kept = [r for r in read_jsonl(file) if r["key"] == key]
    replace(file, "".join(json.dumps(r) + "\n" for r in kept))

    def keep(outcome: list[bool | None]) -> None:
        with open(file, "a", encoding="utf-8") as f:
            f.write(json.dumps({"key": key, "faster": dict(zip(ids, outcome))}) + "\n")

    with tqdm(total=len(pairs) * rounds, initial=len(pairs) * min(len(kept), rounds), desc="paired rounds", unit="pair",
              disable=None) as bar:
        found = code.paired_rounds(pairs, rounds=rounds, done=[list(r["faster"].values()) for r in kept], keep=keep,
                                   progress=bar.update, **job.limits)
    if not found["rounds"]:
        return {}
    shares = [100 * share for share in found["rounds"]]
    return {"Efficiency": {"value": sum(shares) / len(shares), "low": min(shares), "high": max(shares), "n": found["pairs"],
                           "rounds": shares}}


# ---------------------------------------------------------------- runs side by side


def compare(args: argparse.Namespace) -> int:
    folders = [Path(name) for name in args.compare]
    labels = [f.name for f in folders] if len({f.name for f in folders}) == len(folders) else list(map(str, folders))
    found = {}
    for label, folder in zip(labels, folders):
        found[label] = report.read_run(folder)
        if not any(found[label]):
            raise ValueError(f"--compare {folder}: neither results of eval.py nor a training run's metrics.jsonl are there")
    results = {label: summaries for label, (summaries, _) in found.items() if summaries}
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if results:
        text = report.table(results)
        replace(out / "comparison.md", text)
        print(f"{text}\n{out / 'comparison.md'}")
    for file in report.plots(results, {label: rows for label, (_, rows) in found.items() if rows}, out):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
