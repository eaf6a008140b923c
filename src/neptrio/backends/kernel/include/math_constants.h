// Everything is in neptrio_host.h, which is included before every source.
#pragma once
