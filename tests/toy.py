"""A user's environment, as small as one can be, for tests: rewards that hang on the reply's text, one turn or several."""

from envs import Score, Task


class Episode:
    def __init__(self, task, turns):
        self.task, self.turns, self.replies = task, turns, []

    def step(self, reply):
        if self.task.data == "raises in step":
            raise RuntimeError("the environment broke")
        self.replies.append(reply)
        if self.task.data == "no content":
            return [{"role": "user"}]
        more = len(self.replies) < self.turns
        return [{"role": "user", "content": f"turn {len(self.replies)} <|im_end|> is over"}] if more else []


class Toy:
    reward_names = ("vowels", "length")
    reward_weights = (1.0, 0.5)

    def __init__(self, turns: int = 1, tasks: int = 5, wrong: str = ""):
        self.turns, self.count, self.wrong = turns, tasks, wrong

    def tasks(self, split):
        return [Task(f"{split}-{i}", [{"role": "user", "content": f"Say something, {split} number {i}."}])
                for i in range(self.count)]

    def reference(self, task):
        return "aeiou" * 3

    def start(self, task):
        if task.data == "raises in start":
            raise RuntimeError("cannot start")
        return Episode(task, self.turns)

    def score(self, episodes):
        return [self.one("".join(e.replies), e.task) for e in episodes]

    def one(self, text, task):
        if task.data == "raises in score":
            raise RuntimeError("cannot score")
        if task.data == "none":
            return None
        if task.data == "no such reward":
            return Score({"length": 1.0})
        if task.data == "no score":
            return Score({}, error="the sandbox died")
        if task.data == "nan" or (self.wrong and task.id.endswith(self.wrong)):
            return Score({"vowels": float("nan"), "length": 1.0})
        return Score({"vowels": sum(c in "aeiou" for c in text) / (len(text) or 1), "length": min(len(text) / 100, 1.0)},
                     {"characters": len(text)})
