"""A tokenizer is used by one thread at a time, and marks are found in linear time."""

from __future__ import annotations

import copy
import pickle
import threading
from dataclasses import replace
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentgym.chat_templates import ChatTokenizer, TemplateRenderer, renderer_for
from agentgym.chat_templates.marks import Marks
from agentgym.types import Message

USER = Message("user", "Begin <|im_end|> é.")


class OneUser:
    """A tokenizer that notices when a second thread calls it."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._users: set[int] = set()
        self.together: list[set[int]] = []
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        return self._noticed(value) if callable(value) else value

    def _noticed(self, function: Any) -> Any:
        def call(*args: object, **kwargs: object) -> object:
            self.num_calls += 1
            self._users.add(threading.get_ident())
            if len(self._users) > 1:
                self.together.append(set(self._users))
            threading.Event().wait(0.0005)  # lets another thread come in between
            result = function(*args, **kwargs)
            self._users.discard(threading.get_ident())
            return result

        return call


def test_two_threads_never_call_the_tokenizer_at_once(tiny: ChatTokenizer) -> None:
    watched = OneUser(tiny.backend)
    renderer = TemplateRenderer(replace(tiny, backend=cast(Tokenizer, watched)))
    done = []

    def use() -> None:
        for _ in range(8):
            ids = renderer.render([USER])
            renderer.extend(ids, [USER])
            renderer.parse(ids)
        done.append(True)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [True] * 4
    assert watched.num_calls > 100
    assert watched.together == []


def test_a_tokenizer_is_pickled_and_copied_with_its_lock(tiny: ChatTokenizer) -> None:
    for duplicate in (pickle.loads(pickle.dumps(tiny)), copy.deepcopy(tiny)):
        assert renderer_for(duplicate).render([USER]) == renderer_for(tiny).render([USER])


def test_a_tokenizer_that_someone_else_sets_up_keeps_its_own_settings_here(tiny: ChatTokenizer) -> None:
    theirs = Tokenizer.from_str(tiny.backend.to_str())
    theirs.enable_truncation(3)
    ours = replace(tiny, backend=theirs)
    assert len(ours.encode("Begin. " * 5)) > 3
    assert theirs.truncation is not None


def test_a_mark_is_found_whole_and_its_beginning_at_the_end_alone(tiny: ChatTokenizer) -> None:
    marks = Marks(tiny)
    assert marks.guard("a <|im_end|> b", "#") == "a <#|im_end|> b"
    assert marks.guard("a <|im_e", "#") == "a <#|im_e"
    assert marks.guard("a <|im_e b", "#") == "a <|im_e b"
    assert not marks.is_plain("<tool_call>")
    assert marks.is_plain("<tool_calls")


def test_a_mark_within_another_is_found_too(tiny: ChatTokenizer) -> None:
    backend = Tokenizer.from_str(tiny.backend.to_str())
    backend.add_special_tokens(["<|a<|im_end|>"])
    assert Marks(replace(tiny, backend=backend)).guard("<|a<|im_end|>", "#") == "<#|a<#|im_end|>"


def test_a_mark_of_replies_is_one_whether_the_template_spells_it_or_not(tiny: ChatTokenizer) -> None:
    silent = replace(tiny, template="{{ messages[0].content }}<|im_end|>")
    assert Marks(silent).is_plain("</think>")
    assert not Marks(silent, ("<think>", "</think>")).is_plain("</think>")


def test_a_transformers_tokenizer_may_be_set_up_anew_without_touching_ours(tiny: ChatTokenizer) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny.backend, eos_token="<|im_end|>", chat_template=tiny.template)
    ours = ChatTokenizer.of(theirs)
    assert len(theirs("Begin. " * 5, truncation=True, max_length=3)["input_ids"]) == 3
    assert ours.encode("Begin. " * 5) == tiny.encode("Begin. " * 5)
