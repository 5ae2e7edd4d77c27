// To be included first: products and sums are not rounded as one, so that codes do not depend on where GCC fuses them.
// (Clang's -ffp-contract=fast may overrule its pragma.)
#pragma once

#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
