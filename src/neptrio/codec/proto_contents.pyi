# The types of cext/codec/proto_contents.pyx, which says what everything does.
