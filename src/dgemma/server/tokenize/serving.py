"""Tokens of texts and chats, and texts of tokens. The engine has no part in it."""

from __future__ import annotations

from collections.abc import Sequence

from dgemma.errors import InputError
from dgemma.server.http.errors import context_too_long, invalid_input
from dgemma.server.reply import ChatTurn, ReplyServing
from dgemma.server.tokenize.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    OptionalModel,
    TokenizeChatRequest,
    TokenizePromptRequest,
    TokenizeRequest,
    TokenizeResponse,
)


class TokenizeServing(ReplyServing):
    """The handler of /tokenize and /detokenize."""

    def tokenize(self, request: TokenizeRequest) -> tuple[str, TokenizeResponse]:
        model = self._model(request)
        if isinstance(request, TokenizeChatRequest):
            tokens, field = self._chat_tokens(request), "messages"
        else:
            field = "prompt" if isinstance(request, TokenizePromptRequest) else "content"
            encode = self.text.encode_prompt if request.has_bos else self.text.encode_text
            try:
                tokens = encode(request.text)
            except InputError as error:
                raise invalid_input(error, default_field=field, prefix=f"{field}: ") from None
        self._check_length(tokens, field)
        texts = {"token_strs": self._texts(tokens)} if request.return_token_strs else {}
        most = self.served.max_positions
        return model, TokenizeResponse(tokens=list(tokens), count=len(tokens), max_model_len=most, **texts)

    def detokenize(self, request: DetokenizeRequest) -> tuple[str, DetokenizeResponse]:
        model = self._model(request)
        self._check_length(request.tokens, "tokens")
        self.check_vocabulary(request.tokens, "tokens")
        text = self.text.decode(request.tokens)
        return model, DetokenizeResponse(prompt=text, content=text)

    def _model(self, request: OptionalModel) -> str:
        name = request.model or self.settings.served_model_name
        self.adapter(name)  # refuses unknown names
        return name

    def _chat_tokens(self, request: TokenizeChatRequest) -> tuple[int, ...]:
        turn = ChatTurn(
            messages=request.messages,
            tools=request.tools or None,
            thinking=request.thinking,
            field_names={"enable_thinking": "chat_template_kwargs"},
        )
        return self.prompt(turn).tokens

    def _check_length(self, tokens: Sequence[int], field: str) -> None:
        """Also bounds the response, which is several times as large as a body of one letter after another."""
        most = self.served.max_positions
        if len(tokens) > most:
            raise context_too_long(
                f"{field} has {len(tokens)} tokens; this model's context has {most}. Shorten or split it.",
                field,
            )

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        texts = {token: self.text.token_text(token).text for token in set(tokens)}
        return [texts[token] for token in tokens]
