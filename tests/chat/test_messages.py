"""What is no conversation is one line that says where."""

import copy

import pytest

from k3jax import chat

USER, REPLY = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def calling(**function):
    return {"role": "assistant", "tool_calls": [{"function": function}]}


def test_good_conversations(conversations):
    for given in conversations:
        before = copy.deepcopy(given)
        ends = given["messages"][-1]["role"] == "assistant"
        chat.check_messages(given["messages"], given["tools"], "f:1", training=ends)
        chat.encode(**given)
        assert given == before
    chat.check_messages(
        (USER, {"role": "assistant", "content": None, "tool_calls": None, "reasoning_content": None, "name": None}),
        None,
    )


@pytest.mark.parametrize(
    "messages, wrong",
    [
        ("hi", "messages: found 'hi', must be a list of at least one"),
        ([], "messages: found [], must be a list of at least one"),
        (None, "messages: found None, must be a list of at least one"),
        (["hi"], "message 1: found 'hi', must be an object with role and content"),
        ([USER, {"content": "a"}], "message 2: role: found None, must be system, developer, user, assistant or tool"),
        (
            [{"role": "robot", "content": "a"}],
            "message 1: role: found 'robot', must be system, developer, user, assistant or tool",
        ),
        (
            [{"role": ["user"], "content": "a"}],
            "message 1: role: found ['user'], must be system, developer, user, assistant or tool",
        ),
        ([{"role": "user"}], "message 1: content: found None, must be text or a list of parts"),
        (
            [{"role": "user", "content": {"a": 1}}],
            "message 1: content: found {'a': 1}, must be text or a list of parts",
        ),
        ([{"role": "user", "content": 3}], "message 1: content: found 3, must be text or a list of parts"),
        (
            [{"role": "user", "content": ["a"]}],
            "message 1: content: part 1: found 'a', must be an object of type text or image or image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "audio", "audio": "a"}]}],
            "message 1: content: part 1: found {'type': 'audio', 'audio': 'a'}, must be an object of type "
            "text or image or image_url",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "message 1: content: part 1: text: found 3, must be text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "message 1: content: part 1: found {'type': 'image_url'}, must name an image (image_url)",
        ),
        (
            [{"role": "assistant", "content": [{"type": "image", "image": "a"}]}],
            "message 1: content: part 1: found {'type': 'image', 'image': 'a'}, must be an object of type text",
        ),
        ([{"role": "user", "content": "a", "name": 3}], "message 1: name: found 3, must be text"),
        (
            [{"role": "user", "content": "\ud83d"}],
            "message 1: content: found half a character, U+D83D, at position 0, must be whole ones",
        ),
        (
            [{"role": "assistant", "reasoning_content": ["a"]}],
            "message 1: reasoning_content: found ['a'], must be text",
        ),
        (
            [{"role": "user", "content": "a", "reasoning_content": "b"}],
            "message 1: reasoning_content: found with role user, must be in a message of role assistant",
        ),
        (
            [{"role": "user", "content": "a", "tool_calls": [1]}],
            "message 1: tool_calls: found with role user, must be in a message of role assistant",
        ),
        (
            [{"role": "user", "tools": []}],
            "message 1: tools: found with role user, must be in a message of role system",
        ),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "message 1: tool_calls: found {'a': 1}, must be a list"),
        (
            [USER, calling(arguments={})],
            "message 2: tool_calls: entry 1: found {'function': {'arguments': {}}}, must be "
            '{"function": {"name": ..., "arguments": ...}}',
        ),
        (
            [calling(name="")],
            "message 1: tool_calls: entry 1: found {'function': {'name': ''}}, must be {\"function\": .*}",
        ),
        ([calling(name=3)], "message 1: tool_calls: entry 1: found .*, must be .*"),
        (
            [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "message 1: tool_calls: entry 1: found .*, must be .*",
        ),
        ([{"role": "assistant", "tool_calls": ["f"]}], "message 1: tool_calls: entry 1: found 'f', must be .*"),
        (
            [calling(name="f", arguments='{"k": 1')],
            "message 1: tool_calls: entry 1: arguments of f: found '{\"k\": 1', must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments="[1]")],
            "message 1: tool_calls: entry 1: arguments of f: found '[1]', must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments='"a"')],
            "message 1: tool_calls: entry 1: arguments of f: found '\"a\"', must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments=[1])],
            "message 1: tool_calls: entry 1: arguments of f: found [1], must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments={3: 1})],
            "message 1: tool_calls: entry 1: arguments of f: found {3: 1}, must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments='{"k": NaN}')],
            "message 1: tool_calls: entry 1: arguments of f: found '{\"k\": NaN}', must be a JSON object or its text",
        ),
        (
            [calling(name="f", arguments={"k": float("inf")})],
            "message 1: tool_calls: entry 1: arguments of f: found {'k': inf}, must be JSON .*",
        ),
        (
            [calling(name="f", arguments={"k": {1, 2}})],
            "message 1: tool_calls: entry 1: arguments of f: found {'k': {1, 2}}, must be JSON "
            "(Object of type set is not JSON serializable)",
        ),
        (
            [calling(name="f", arguments="[" * 100_000)],
            "message 1: tool_calls: entry 1: arguments of f: found .*, must be a JSON object .*",
        ),
        (
            [calling(name="f", arguments={"k": "\udbff"})],
            "message 1: tool_calls: entry 1: arguments of f: found half a character, U+DBFF, at position 7, "
            "must be whole ones",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f"}}]}],
            "message 1: tool_calls: entry 1: id: found 3, must be text",
        ),
        (
            [USER, {"role": "tool", "content": "a"}],
            "message 2: found the result of no call, must name one (tool_call_id) or its tool (tool)",
        ),
        (
            [
                calling(name="f"),
                {"role": "tool", "content": "a"},
                {"role": "tool", "content": "a", "tool_call_id": "b"},
            ],
            "message 3: found the result of no call, must name one (tool_call_id) or its tool (tool)",
        ),
    ],
)
def test_bad_messages(messages, wrong):
    with pytest.raises(ValueError) as error:
        chat.check_messages(messages, where="chats.jsonl:7")
    found = str(error.value)
    assert "\n" not in found and len(found) < 250
    begins, *rest = f"chats.jsonl:7: {wrong}".split(".*")
    assert found.startswith(begins) and (found == begins or rest) and found.endswith(rest[-1] if rest else "")


@pytest.mark.parametrize(
    "tools, wrong",
    [
        ({"name": "f"}, "tools: found {'name': 'f'}, must be a list"),
        (["f"], 'tools: entry 1: found \'f\', must be {"function": {"name": ...}}'),
        (
            [{"function": {"description": "f"}}],
            "tools: entry 1: found {'function': {'description': 'f'}}, must be {\"function\": {\"name\": ...}}",
        ),
        (
            [{"name": "f", "x": {1}}],
            "tools: entry 1: found {'name': 'f', 'x': {1}}, must be JSON (Object of type set is not JSON serializable)",
        ),
    ],
)
def test_bad_tools(tools, wrong):
    for messages, given, where in (([USER], tools, ""), ([{"role": "system", "tools": tools}], (), "message 1: ")):
        with pytest.raises(ValueError) as error:
            chat.check_messages(messages, given)
        assert str(error.value) == where + wrong


def test_a_conversation_to_learn_ends_with_the_assistant():
    chat.check_messages([USER, REPLY], training=True)
    chat.check_messages([USER, REPLY, USER])
    for messages in ([USER], [USER, REPLY, USER]):
        with pytest.raises(
            ValueError, match="^f:3: the conversation ends with a message of role user, must end with an assistant's$"
        ):
            chat.check_messages(messages, where="f:3", training=True)


def test_arguments_that_are_no_json_are_written_as_they_are():
    broken = calling(name="f", arguments='{"k": 1')
    assert '<|open|>json type="object"<|sep|>{"k": 1<|close|>json<|sep|>' in chat.text(chat.encode([broken]))
    for other in ("[1]", [1]):
        with pytest.raises(ValueError, match="must be a JSON object or its text$"):
            chat.encode([calling(name="f", arguments=other)])
