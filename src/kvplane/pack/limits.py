"""What format 1 allows; checked before memory is taken."""

FORMAT = 1
BLOCK = 256
HEADER_NBYTES = 1 << 20
DOCUMENT_NBYTES = 64 << 20
NODE_NBYTES = 16 << 10
ROOT_NBYTES = 1 << 10
LEASE_NBYTES = 1 << 10
JSON_DEPTH = 16
# as many as 2^17 spans have, with room: bounds what parsing takes
JSON_VALUES = 1 << 20
SPANS = 1 << 17
TOKENS = 1 << 24
LAYERS = 1024
INTEGER_STOP = 1 << 53
# rows that a sliding group's first piece may reach back to begin on a block's edge
ROUND_DOWN = 32
# of one tensor in a blob of states
TENSOR_AXES = 8
STATES_NBYTES = 1 << 32

# threads that hash while others copy; more are no faster on memory that all share
WORKERS = 2
# threads that wait for the disk, which syncs several files in the time of one
WRITERS = 4
