"""What kvpack v1 bounds, so that no length is believed before it is compared with one of these."""

from typing import Final

ALIGNMENT: Final = 4096
PLAINTEXT_NBYTES: Final = 4 << 20
FRAME_HEAD_NBYTES: Final = 16
# worst case of the lossless codec: its head and one control byte for 128 bytes
FRAME_NBYTES: Final = PLAINTEXT_NBYTES + 32_784
TAG_NBYTES: Final = 16
CHUNK_NBYTES: Final = 4_235_296
MANIFEST_NBYTES: Final = 256 << 20
STATES: Final = 65_536
GROUPS: Final = 65_536
CHUNKS: Final = 65_536
DEPENDENCIES: Final = 64
RANK: Final = 8
DELTA_DEPTH: Final = 7
BLOCK: Final = 256
SIDECAR_NBYTES: Final = 3_858
SIDECAR_CHANNELS: Final = 512
SIDECAR_TOKENS: Final = 768
SIDECAR_SINKS: Final = 8
RESTORED_NBYTES: Final = 4 << 40
NAME_NBYTES: Final = 255
EPOCH_WINDOW: Final = 64
U16: Final = (1 << 16) - 1
U32: Final = (1 << 32) - 1
U64: Final = (1 << 64) - 1
