"""The API's own description (OpenAPI 3.1): requests from the wire models, answers and errors written out."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from serving.api.schema import ChatCompletionRequest, CompletionRequest

Json = dict[str, object]

_SCHEMAS = "#/components/schemas/"
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NULLABLE_STRING: Json = {"type": ["string", "null"]}
_FINISH: Json = {"enum": ["stop", "length", "tool_calls"]}
_LOGPROBS: Json = {"type": ["object", "null"]}


def _object(**properties: object) -> Json:
    """An object that has all of these."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: object) -> Json:
    return {"type": "array", "items": items}


_ERROR = _object(error=_object(message=_STRING, type=_STRING, param=_NULLABLE_STRING, code=_NULLABLE_STRING))
_USAGE = _object(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_TOOL_CALL = _object(id=_STRING, type={"const": "function"}, function=_object(name=_STRING, arguments=_STRING))
_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": _NULLABLE_STRING,
        "refusal": {"type": "null"},
        "tool_calls": _list(_TOOL_CALL),
    },
    "required": ["role", "content"],
}
_MODEL = _object(id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING)


def _answer(kind: str, choice: Json) -> Json:
    return _object(
        id=_STRING, object={"const": kind}, created=_COUNT, model=_STRING, choices=_list(choice), usage=_USAGE
    )


_COMPLETION = _answer("text_completion", _object(index=_COUNT, text=_STRING, logprobs=_LOGPROBS, finish_reason=_FINISH))
_CHAT = _answer("chat.completion", _object(index=_COUNT, message=_MESSAGE, logprobs=_LOGPROBS, finish_reason=_FINISH))

_REFUSALS: Mapping[int, str] = {
    400: "The request cannot be accepted",
    401: "An API key is wanted",
    404: "No such model, request or path",
    405: "Not this method",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "The queue is full",
    500: "A fault of the server",
    503: "No worker, or the server is draining",
    504: "The deadline has passed",
}


def describe(model: str, version: str) -> Json:
    """The document that GET /openapi.json answers with.

    Args:
        model: the one served model.
        version: of this software.
    """
    definitions: Json = {"Error": _ERROR, "Completion": _COMPLETION, "ChatCompletion": _CHAT, "Model": _MODEL}
    for wire in (CompletionRequest, ChatCompletionRequest):
        definitions |= _definitions(wire, model)
    paths: dict[str, Json] = {
        "/v1/completions": _generation("Continue prompts", "CompletionRequest", "Completion"),
        "/v1/chat/completions": _generation("Answer a conversation", "ChatCompletionRequest", "ChatCompletion"),
        "/v1/models": _get("The served model", _object(object={"const": "list"}, data=_list(_ref("Model")))),
        "/v1/models/{name}": _get("One model", _ref("Model"), parameter="name"),
        "/health": _get("Whether a request sent now can make progress", _object(status=_STRING)),
        "/ready": _get("The same, for load balancers", _object(status=_STRING)),
        "/version": _get("What runs here", _object(version=_STRING)),
        "/requests/{api_id}": _get("Where the time of a request went", {"type": "object"}, parameter="api_id"),
        "/cluster/state": _get("The cluster's account of itself", {"type": "object"}),
    }
    # An unhealthy server says so in its own words.
    for path in ("/health", "/ready"):
        operation = paths[path]["get"]
        assert isinstance(operation, dict)
        operation["responses"]["503"] = _response("It cannot", _object(status=_STRING, reason=_STRING))
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": version},
        "paths": paths,
        "components": {"schemas": definitions, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _definitions(wire: type[BaseModel], model: str) -> Json:
    """A wire model and what it refers to, by name."""
    schema = wire.model_json_schema(ref_template=_SCHEMAS + "{model}")
    nested: Json = schema.pop("$defs", {})
    schema["properties"]["model"] = {"const": model}
    return {**nested, wire.__name__: schema}


def _ref(name: str) -> Json:
    return {"$ref": _SCHEMAS + name}


def _response(description: str, schema: Json) -> Json:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _responses(success: Json, refusals: Sequence[int]) -> Json:
    return {"200": success, **{str(status): _response(_REFUSALS[status], _ref("Error")) for status in refusals}}


def _generation(summary: str, request: str, answer: str) -> Json:
    success = _response("The answer; a stream of events when `stream` is set", _ref(answer))
    content = success["content"]
    assert isinstance(content, dict)
    content["text/event-stream"] = {"schema": _object(data=_STRING)}  # of each event
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": _responses(success, tuple(_REFUSALS)),
        }
    }


def _get(summary: str, schema: Json, parameter: str = "") -> Json:
    operation: Json = {
        "summary": summary,
        "responses": _responses(_response("Found", schema), (401, 404, 405, 500, 503)),
    }
    if parameter:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": _STRING}]
    return {"get": operation}
