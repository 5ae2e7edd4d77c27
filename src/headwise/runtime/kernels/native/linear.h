// Linear layers of a few rows, several at a time.
#pragma once

#include "abi.h"

// Products of equally many rows, shared out among the threads at once; see with_type for `type` and for what is
// returned.
int multiply_all(const LinearArguments* products, int count, int type);
