"""Conversations to tokens and back, in the released chat format. Nothing here imports JAX."""

from k3jax.chat.encode import Piece, by_message, encode, ids, text
from k3jax.chat.messages import check_messages, image_file, image_name, images, parts
from k3jax.chat.parse import Delta, Parser

__all__ = [
    "Delta",
    "Parser",
    "Piece",
    "by_message",
    "check_messages",
    "encode",
    "ids",
    "image_file",
    "image_name",
    "images",
    "parts",
    "text",
]
