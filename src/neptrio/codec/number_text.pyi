# The types of cext/codec/number_text.pyx, which says what everything does.

