// Package specs is the plan of a tournament: its types, the strict reading of
// plan files and of the flags that stand for one, the defaults, the JSON Schema
// and the example that a newcomer starts from.
//
// What must hold:
//
//   - Nothing is accepted and ignored. A key, a value or a piece of YAML that
//     has no meaning here is an error with file, line and column, and all the
//     errors of a plan are reported at once, in the order of the file.
//   - Text reaches commands and the environment as it is written: no scalar is
//     ever turned into a number, a boolean or a date on its way.
//   - One rule, one place: the struct tags of [Plan] name the keys and their
//     rules, and the reader, the flags and the schema all go by them.
//   - Reading a plan starts nothing, writes nothing and looks at no file but
//     the plan. Its cost is bounded: 1 MiB of YAML, 64 levels, 200,000 values
//     once aliases are expanded.
//
// The package is a leaf: it imports no other package of this module, nor
// os/exec, nor cobra. yaml.v3 is imported in yaml.go only, and nothing of it
// is seen outside that file. It builds and works on every system, since plans
// are written and checked where no tournament can run.
package specs
