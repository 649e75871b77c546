"""Every bit comes back, states compress, and damaged frames are refused with an error that names the sample."""

from __future__ import annotations

import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_samples import DTYPES, bits, kinds, model_like, seeds, specs

from storage.codec import CODECS, decode, encode, kernels, planes
from storage.errors import DamagedError, SchemaError
from storage.types import StateSpec

WHERE = "shards/x: sample row 7 turn 0 n 0"
SPEC = StateSpec((2, 15), 48)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_bit_comes_back(codec: str, dtype: str, data: st.DataObject) -> None:
    spec = data.draw(specs(dtype))
    rows = data.draw(st.integers(0, 60))
    states_TLH = bits(spec, rows, data.draw(kinds), data.draw(seeds))
    kept = states_TLH.copy()
    frame = encode(states_TLH, spec, codec)
    np.testing.assert_array_equal(states_TLH, kept)
    decoded = decode(frame, rows, spec, codec)
    assert decoded.dtype == spec.np_dtype
    np.testing.assert_array_equal(decoded, states_TLH)
    out = np.empty_like(states_TLH)
    assert decode(bytes(frame), rows, spec, codec, out=out) is out
    np.testing.assert_array_equal(out, states_TLH)


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_of_several_chunks(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 rows, so that 23 rows end in a short one; and offsets from a sample of the rows."""
    monkeypatch.setattr(planes, "_CHUNK_ELEMENTS", 5 * 48 + 7)
    monkeypatch.setattr(kernels, "SAMPLED_ROWS", 4)
    spec = StateSpec((0, 1, 2), 48, dtype)
    states_TLH = model_like(spec, 23, 1)
    frame = encode(states_TLH, spec, "planes-zstd")
    monkeypatch.undo()
    np.testing.assert_array_equal(decode(frame, 23, spec, "planes-zstd"), states_TLH)


def test_states_that_are_not_contiguous() -> None:
    wide_TLH = model_like(StateSpec((0, 1, 2), 96), 40, 2)
    view_TLH = wide_TLH[::2, 1:, ::2]
    for codec in CODECS:
        frame = encode(view_TLH, SPEC, codec)
        np.testing.assert_array_equal(decode(frame, 20, SPEC, codec), view_TLH)


def test_split_and_join_are_inverse_for_every_16_bit_pattern() -> None:
    x_TLH = np.arange(1 << 16, dtype=np.uint16).reshape(64, 2, 512)
    low_TLH, joined_TLH = np.empty(x_TLH.shape, np.uint8), np.zeros_like(x_TLH)
    random = np.random.default_rng(8)
    for layer in range(2):
        x_TH = x_TLH[:, layer]
        channel_H, row_T = random.integers(0, 256, (512,), np.uint8), np.empty(64, np.uint8)
        exponent_TH = np.empty(x_TH.shape, np.uint8)
        kernels.split(x_TLH, layer, exponent_TH, low_TLH)
        np.testing.assert_array_equal(exponent_TH, (x_TH >> 7) & 0xFF)
        np.testing.assert_array_equal(low_TLH[:, layer], (x_TH & 0x7F) | (x_TH >> 15 << 7))
        kernels.centre(exponent_TH, channel_H, 0, row_T)
        np.testing.assert_array_equal(exponent_TH, ((x_TH >> 7) - channel_H - row_T[:, None]).astype(np.uint8))
        kernels.join(exponent_TH, channel_H, row_T, low_TLH, layer, joined_TLH)
    np.testing.assert_array_equal(joined_TLH, x_TLH)


def test_row_offsets_are_the_distance_from_the_mean_row() -> None:
    exponent_TH = np.full((4, 16), 100, np.uint8) + np.array([0, 2, 4, 40], np.uint8)[:, None]
    row_T = np.empty(4, np.uint8)
    # Distances 0, 2, 4 and 6 (clipped) from channels at 100: their mean is 3.
    kernels.centre(exponent_TH, np.full(16, 100, np.uint8), 0, row_T)
    np.testing.assert_array_equal(row_T.view(np.int8), [-3, -1, 1, 3])


def test_kernels_compile_where_no_cache_can_be_kept() -> None:
    """A read-only installation and no home directory: numba then refuses `cache=True`."""
    script = (
        "import numba.core.caching as c\n"
        "for locator in c.CacheImpl._locator_classes: locator.from_function = classmethod(lambda *a: None)\n"
        "import numpy as np\n"
        "from storage.codec import decode, encode\n"
        "from storage.types import StateSpec\n"
        "spec = StateSpec((0, 1), 32)\n"
        "x = np.arange(320, dtype=np.uint16).reshape(5, 2, 32)\n"
        "assert (decode(encode(x, spec, 'planes-zstd'), 5, spec, 'planes-zstd') == x).all()\n"
        "from storage.codec import kernels\n"
        "print(type(kernels.join._cache).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "NullCache\n"), done.stderr


@pytest.mark.parametrize(
    ("dtype", "least"),
    # 16 bits over 8 raw ones and 2.65 of exponent; 11 raw ones in float16; 24 raw ones in float32.
    [("bfloat16", 1.46), ("float16", 1.16), ("float32", 1.18)],
)
def test_model_like_states_compress(dtype: str, least: float) -> None:
    spec = StateSpec((0, 1, 2, 3), 576, dtype)
    states_TLH = model_like(spec, 256, 3)
    assert states_TLH.nbytes / len(encode(states_TLH, spec, "planes-zstd")) >= least


def test_widened_bf16_states_cost_no_more_than_bf16() -> None:
    narrow, wide = StateSpec((0, 1), 576), StateSpec((0, 1), 576, "float32")
    narrow_TLH = model_like(narrow, 100, 4)
    frame = encode(narrow_TLH.astype(np.uint32) << 16, wide, "planes-zstd")
    assert len(frame) < 1.01 * len(encode(narrow_TLH, narrow, "planes-zstd"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_does_not_grow(dtype: str) -> None:
    spec = StateSpec((0, 1, 2, 3), 576, dtype)
    states_TLH = bits(spec, 100, "noise", 5)
    # Offsets (1 byte per channel and layer, 1 per row and layer) and chunk headers are all that is added.
    assert len(encode(states_TLH, spec, "planes-zstd")) <= states_TLH.nbytes + 4 * (576 + 100) + 512


def test_offsets_make_channels_alike() -> None:
    """Channels whose scales differ by powers of two have one distribution once their offsets are subtracted."""
    random = np.random.default_rng(6)
    powers_H = random.integers(-12, 12, 64)
    values_TH = (random.normal(0, 1, (300, 64)) * np.exp2(powers_H)).astype(np.float32)
    x_TLH = (values_TH.view(np.uint32) >> 16).astype(np.uint16)[:, None]
    offsets_H = kernels.channel_offsets(x_TLH, 0, 0).astype(int)
    # Scales lie up to 12 steps around the middle, beyond the clip at 6: exact within, held at the border outside.
    inner = np.abs(powers_H) <= 3
    centred = offsets_H[inner] - powers_H[inner]
    assert np.ptp(centred) <= 1


def test_codec_none_shares_memory() -> None:
    states_TLH = model_like(SPEC, 10, 7)
    frame = encode(states_TLH, SPEC, "none")
    assert np.shares_memory(np.frombuffer(frame, np.uint16), states_TLH)
    assert np.shares_memory(decode(frame, 10, SPEC, "none"), states_TLH)


@pytest.mark.parametrize(
    ("states_TLH", "message"),
    [
        (np.zeros((3, 2, 48), np.float16), "float16"),
        (np.zeros((3, 2, 47), np.uint16), r"\[3, 2, 47\]"),
        (np.zeros((3, 1, 48), np.uint16), r"expected uint16 .* \[rows, 2, 48\]"),
        (np.zeros((3, 96), np.uint16), r"\[3, 96\]"),
        (np.zeros((3, 2, 48), np.uint32), "uint32"),
    ],
)
def test_wrong_states_are_refused(states_TLH: np.ndarray, message: str) -> None:
    for codec in CODECS:
        with pytest.raises(ValueError, match=message):
            encode(states_TLH, SPEC, codec)


def test_a_wrong_place_for_the_result_is_refused() -> None:
    frame = encode(model_like(SPEC, 6, 0), SPEC, "planes-zstd")
    for out in (
        np.empty((5, 2, 48), np.uint16),
        np.empty((6, 2, 48), np.int16),
        np.empty((6, 2, 96), np.uint16)[..., ::2],
    ):
        with pytest.raises(ValueError, match="out is "):
            decode(frame, 6, SPEC, "planes-zstd", out=out)


def test_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'lz4' is not one of \['none', 'planes-zstd'\]"):
        encode(model_like(SPEC, 1, 0), SPEC, "lz4")
    with pytest.raises(ValueError, match="'lz4'"):
        decode(b"", 0, SPEC, "lz4")


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_is_refused(codec: str) -> None:
    frame = bytes(encode(model_like(SPEC, 6, 8), SPEC, codec))
    for length in range(len(frame)):
        with pytest.raises(DamagedError, match=WHERE):
            decode(frame[:length], 6, SPEC, codec, where=WHERE)
    with pytest.raises(DamagedError, match=WHERE):
        decode(frame + b"\0", 6, SPEC, codec, where=WHERE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flipped_bits_never_give_another_kind_of_error(dtype: str) -> None:
    """Any bit of a frame may be wrong: the frame is refused, or a sample comes out for the checksum to judge."""
    spec = StateSpec((0, 1), 16, dtype)
    states_TLH = model_like(spec, 9, 9)
    frame = bytes(encode(states_TLH, spec, "planes-zstd"))
    refused = 0
    for position in range(len(frame)):
        for bit in range(8):
            damaged = bytearray(frame)
            damaged[position] ^= 1 << bit
            try:
                decoded = decode(damaged, 9, spec, "planes-zstd", where=WHERE)
            except DamagedError as error:
                if WHERE not in str(error):
                    raise
                refused += 1
            else:
                assert position >= 64, "a damaged header went through"
                assert decoded.shape == states_TLH.shape
    assert refused >= 64 * 8


@settings(max_examples=60, deadline=None)
@given(junk=st.binary(max_size=300))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(DamagedError, match=WHERE):
        decode(junk, 3, SPEC, "planes-zstd", where=WHERE)


@pytest.mark.parametrize(
    ("rows", "spec", "message"),
    [
        (5, SPEC, r"holds bfloat16 \[6, 2, 48\], expected bfloat16 \[5, 2, 48\]"),
        (6, StateSpec((2,), 96), r"expected bfloat16 \[6, 1, 96\]"),
        (6, StateSpec((2, 15), 48, "float16"), r"holds bfloat16 .* expected float16"),
    ],
)
def test_another_samples_frame_is_refused(rows: int, spec: StateSpec, message: str) -> None:
    frame = encode(model_like(SPEC, 6, 10), SPEC, "planes-zstd")
    with pytest.raises(DamagedError, match=message):
        decode(frame, rows, spec, "planes-zstd", where=WHERE)


def _with_header(frame: bytes, **changes: int) -> bytes:
    """The frame with header fields changed and the header's checksum made right again."""
    layout = struct.Struct("<4sBBBxQIIIQQQQ")
    names = ["magic", "version", "dtype", "flags", "rows", "layers", "hidden", "rows_per_chunk"]
    names += ["low", "exponents", "offsets", "tail"]
    fields = dict(zip(names, layout.unpack(frame[:60]), strict=True)) | changes
    header = layout.pack(*fields.values())
    return header + xxhash.xxh32(header).digest() + frame[64:]


def test_a_newer_frame_is_refused_by_its_version() -> None:
    frame = bytes(encode(model_like(SPEC, 6, 11), SPEC, "planes-zstd"))
    assert _with_header(frame) == frame
    with pytest.raises(SchemaError, match=f"{WHERE}: .*version 2"):
        decode(_with_header(frame, version=2), 6, SPEC, "planes-zstd", where=WHERE)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows_per_chunk": 0},
        {"rows_per_chunk": 5},
        {"rows_per_chunk": (1 << 32) - 1, "exponents": 1 << 60},
        {"low": 0},
        {"low": (1 << 64) - 1},
        {"exponents": 0},
        {"offsets": 0},
        {"tail": 1 << 40},
        {"rows": 1 << 60},
    ],
)
def test_a_lying_header_is_refused_before_memory_is_taken(changes: dict[str, int]) -> None:
    frame = bytes(encode(model_like(SPEC, 6, 12), SPEC, "planes-zstd"))
    with pytest.raises(DamagedError, match=WHERE):
        decode(_with_header(frame, **changes), 6, SPEC, "planes-zstd", where=WHERE)
